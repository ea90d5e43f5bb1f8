"""Tiny random models of every family, written as Hugging Face folders by transformers itself.

Weights are scaled so that greedy choices are clear (median gap between the best two logits over
0.1): a rounding difference between two right implementations then rarely changes a token.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 259, "max_position_embeddings": 512,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama31": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama_padded_heads": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3,
         "tie_word_embeddings": True},
    ),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
         "tie_word_embeddings": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
         "norm_topk_prob": True, "tie_word_embeddings": False},
    ),
}  # fmt: skip

# The same families with the other choice of tied embeddings, KV heads or rope scaling.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama32": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
         "tie_word_embeddings": False},
    ),
    "mistral_tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen25": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe_tied": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def write_tiny_model(name: str, folder: Path, *, seed: int = 0, scale: float = 10.0) -> Path:
    """Writes config, weights and a byte-level tokenizer of the tiny model `name` to `folder`."""
    import torch
    import transformers

    family, changes = (TINY | VARIANTS)[name]
    fields = {**_SHAPE, **changes}
    if family == "Qwen2":
        fields.pop("head_dim")
    config = getattr(transformers, f"{family}Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.mul_(1.2 * scale if "embed" in parameter_name else scale)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 bytes and three specials: no file of anybody else is needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    vocab |= {"<bos>": 256, "<eos>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of a model folder's config.json in place (None removes)."""
    path = Path(os.fspath(folder)) / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.__setitem__(key, value)
    path.write_text(json.dumps(config))


def write_tiny_reward_model(trunk: Path, folder: Path, *, seed: int = 3, **changes: Any) -> Path:
    """A sequence classifier with one label on the weights of a tiny model, with its tokenizer.

    Args:
        changes: fields of config.json, see `edit_config`.
    """
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        trunk, num_labels=1, dtype=torch.float32
    )
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    edit_config(folder, **changes)
    return folder
