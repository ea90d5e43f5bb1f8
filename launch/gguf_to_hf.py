"""Turn a Llama-family GGUF file with a byte-level BPE vocabulary into a Hugging Face folder.

The folder holds what `transformers` expects of a published checkpoint: `config.json`,
`generation_config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json`.

Weights are written in fp32. A quantised GGUF stores `scale * q + minimum` with fp16 scale and
minimum; that product needs more bits than bf16 or fp16 have, so only fp32 keeps the exact
function of the file, and CPU training runs in fp32 anyway.

Shape suffixes: O output features, I input features, V vocabulary, H hidden size.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN_TYPE = 3  # gguf's TokenType.CONTROL: never produced from plain text

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def hf_tensor_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`.

    Raises `ValueError` for a tensor this family does not have, so that nothing is dropped silently.
    """
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in OUTER_TENSORS:
        return f"{OUTER_TENSORS[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{suffix}"
    known = ", ".join([*OUTER_TENSORS, *(f"blk.N.{name}" for name in LAYER_TENSORS)])
    raise ValueError(f"GGUF tensor {gguf_name!r} has no Hugging Face name; known: {known}.")


def unpermute_rope_rows(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k projections.

    GGUF interleaves the two halves of each head, (0, d/2, 1, d/2+1, …), because llama.cpp rotates
    neighbouring pairs; Hugging Face rotates halves and keeps (0, 1, …, d-1).
    """
    rows, columns = weight_OI.shape
    head_dim = rows // num_heads
    return (
        weight_OI.reshape(num_heads, head_dim // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write `gguf_file` as a Hugging Face checkpoint into the existing, empty `folder`.

    Raises `ValueError` if the file is not of the Llama family or its vocabulary is not byte-level
    BPE of the kind that splits single digits.
    """
    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for key, required in [
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ]:
        if metadata.get(key) != required:
            raise ValueError(
                f"{gguf_file.name}: {key} is {metadata.get(key)!r}; only {required!r} is supported."
            )
    weights = _weights(reader, metadata)
    config = _model_config(metadata, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special_ids)
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _weights(reader: GGUFReader, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            value = unpermute_rope_rows(value, heads[kind])
        # The reader memory-maps the file: copy, so that nothing refers to it after the return.
        weights[hf_tensor_name(tensor.name)] = np.array(value, dtype=np.float32, order="C")
    return weights


def _model_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    # The flat `rope_theta` and `torch_dtype` are read by transformers 4 and 5 alike; the nested
    # spelling that transformers 5 writes would silently become theta 10000 in transformers 4.
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as fp32: shortest decimal that reads back as the same fp32, 1e-05 here.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_scaling": None,
        "initializer_range": hidden_size**-0.5,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Digits are split before the byte-level step: "47" is always two tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=metadata["tokenizer.ggml.add_space_prefix"]),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    def token(role: str) -> str:
        return metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{role}_token_id"]]

    # The generic class reads tokenizer.json as it stands; a model-specific one would rebuild the
    # pre-tokenizer from the vocabulary and lose the digit split.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
