"""Megatron-LM's stored command line to an architecture, and an architecture to a command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron_rl.models.architecture import Architecture, Rope

Arguments = argparse.Namespace
# What Megatron's Llama 3 rope scaling computes with besides its factor; it has no settings for it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
_WRITTEN = {
    "family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied",
    "norm_eps", "max_positions", "rope", "qkv_bias", "qk_norm", "padded_for",
}  # fmt: skip
VOCABULARY_MULTIPLE = 128  # Megatron-LM's default of --make-vocab-size-divisible-by

# Argument → what a value other than the listed ones asks for; an absent argument asks for nothing.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("normalization", ("RMSNorm",), "normalization by {}"),
    ("position_embedding_type", ("rope",), "position embeddings of type {}"),
    ("rotary_percent", (1.0,), "rotary embeddings on a part of each head (rotary_percent {})"),
    ("rotary_interleaved", (False,), "interleaved rotary embeddings"),
    ("add_bias_linear", (False,), "biases in all linear layers"),
    ("swiglu", (True,), "a feed-forward layer without SwiGLU"),
    ("squared_relu", (False,), "squared ReLU"),
    ("quick_geglu", (False,), "quick GeGLU"),
    ("apply_layernorm_1p", (False,), "norms with weights centred at zero"),
    ("layernorm_zero_centered_gamma", (False,), "norms with weights centred at zero"),
    ("apply_residual_connection_post_layernorm", (False,), "residuals after the norm"),
    ("multi_latent_attention", (False,), "multi-latent attention (MLA)"),
    ("qk_l2_norm", (False,), "L2 norms of queries and keys"),
    ("attention_output_gate", (False,), "gated attention outputs"),
    ("softmax_type", ("vanilla",), "softmax of type {}"),
    ("softmax_scale", (), "a softmax scale of its own ({})"),
    ("window_size", (), "windowed attention {}"),
    ("no_rope_freq", (), "layers without rotary embeddings ({})"),
    ("experimental_attention_variant", (), "attention variant {}"),
    ("linear_attention_freq", (), "linear attention layers ({})"),
    ("num_experts", (), "mixture of experts ({} experts)"),
    ("mtp_num_layers", (0,), "multi-token prediction ({} layers)"),
    ("hybrid_override_pattern", (), "hybrid (Mamba) layers {}"),
    ("hybrid_layer_pattern", (), "hybrid (Mamba) layers {}"),
    ("hybrid_attention_ratio", (0.0,), "hybrid (Mamba) layers, attention ratio {}"),
    ("is_hybrid_model", (False,), "hybrid (Mamba) layers"),
    ("heterogeneous_layers_config_path", (), "layers of different shapes ({})"),
    ("heterogeneous_layers_config_encoded_json", ("",), "layers of different shapes"),
    ("glu_linear_offset", (0.0,), "an offset in the gated linear unit ({})"),
    ("activation_func_clamp_value", (), "clamped activations ({})"),
)


def get(arguments: Arguments, *names: str, default: Any = None) -> Any:
    """The first of the arguments that is there and not None."""
    found = (getattr(arguments, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def architecture_of(arguments: Arguments, *, source: Path) -> Architecture:
    """What the stored arguments describe.

    Args:
        source: the file they are from, for messages.

    Raises:
        ValueError: listing everything that the models here don't have, or the first argument that
            is missing.
    """
    refused = _refusals(arguments)
    if refused:
        raise ValueError(
            f"{source}: this model can't be built here, it has {'; '.join(refused)}. Supported are "
            "GPT models with RMSNorm, rotary embeddings, SwiGLU and no biases but those of the "
            "query, key and value projections (the families Llama, Mistral, Qwen2 and Qwen3)"
        )
    heads = _count(arguments, "num_attention_heads", source)
    hidden = _count(arguments, "hidden_size", source)
    grouped = bool(get(arguments, "group_query_attention", default=False))
    bias, norm = (bool(get(arguments, n, default=False)) for n in ("add_qkv_bias", "qk_layernorm"))
    return Architecture(
        family="qwen2" if bias else "qwen3" if norm else "llama",
        hidden=hidden, heads=heads, layers=_count(arguments, "num_layers", source),
        kv_heads=_count(arguments, "num_query_groups", source) if grouped else heads,
        head_dim=get(arguments, "kv_channels", default=hidden // heads),
        ffn=_count(arguments, "ffn_hidden_size", source),
        vocab=_vocabulary(arguments, source),
        tied=not get(arguments, "untie_embeddings_and_output_weights", default=False),
        norm_eps=float(get(arguments, "norm_epsilon", "layernorm_epsilon", default=1e-5)),
        max_positions=_count(arguments, "max_position_embeddings", source),
        rope=_rope(arguments), qkv_bias=bias, qk_norm=norm,
    )  # fmt: skip


def _refusals(arguments: Arguments) -> list[str]:
    found = []
    for name, fine, what in _REFUSED:
        value = getattr(arguments, name, None)
        if value is not None and value not in fine:
            found.append(what.format(value))
    if get(arguments, "add_qkv_bias") and get(arguments, "qk_layernorm"):
        found.append("query biases together with query norms")
    if get(arguments, "use_rope_scaling") and get(arguments, "rotary_seq_len_interpolation_factor"):
        found.append("two scalings of rotary embeddings at once")
    return list(dict.fromkeys(found))


def _count(arguments: Arguments, name: str, source: Path) -> int:
    value = getattr(arguments, name, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: the stored argument {name} is {value!r}, not a number above 0")
    return value


def _vocabulary(arguments: Arguments, source: Path) -> int:
    """Rows without padding where the arguments say how many, otherwise all rows."""
    padded = _count(arguments, "padded_vocab_size", source)
    named = get(arguments, "vocab_size", default=padded)
    if str(get(arguments, "tokenizer_type")).startswith("Null"):
        named += 1  # this tokenizer's end-of-document token comes on top of --vocab-size
    multiple = get(arguments, "make_vocab_size_divisible_by", default=VOCABULARY_MULTIPLE)
    multiple *= get(arguments, "tensor_model_parallel_size", default=1)
    return named if padded - multiple < named <= padded else padded


def _rope(arguments: Arguments) -> Rope:
    theta = float(get(arguments, "rotary_base", default=10000))
    if get(arguments, "use_rope_scaling"):
        factor = float(get(arguments, "rope_scaling_factor", default=8.0))
        return Rope(theta=theta, kind="llama3", factor=factor, **_LLAMA3)
    stretch = get(arguments, "rotary_seq_len_interpolation_factor")
    if stretch is not None:
        return Rope(theta=theta, kind="linear", factor=float(stretch))
    return Rope(theta=theta)


def arguments_of(
    arch: Architecture, *, iteration: int, dtype: torch.dtype, tokenizer: bool
) -> Arguments:
    """The command line that builds `arch` in Megatron-LM, for `--use-checkpoint-args`.

    Args:
        tokenizer: the folder holds a Hugging Face tokenizer in `tokenizer/`.

    Raises:
        ValueError: if Megatron-LM has no arguments for it.
    """
    rope = arch.rope
    unknown = [f.name for f in fields(arch)
               if f.name not in _WRITTEN and getattr(arch, f.name) != f.default]  # fmt: skip
    if unknown:
        raise ValueError(
            f"this model has {', '.join(f'{n}={getattr(arch, n)!r}' for n in unknown)}, for which "
            "no Megatron-LM arguments are written: convert it to a Hugging Face folder instead"
        )
    if rope.kind == "llama3":
        numbers = {name: getattr(rope, name) for name in _LLAMA3}
        if numbers != _LLAMA3:
            raise ValueError(
                f"Megatron-LM's rope scaling is fixed to {_LLAMA3}, this model has {numbers}: it "
                "can't be written as a Megatron-LM folder"
            )
    padded = -(-arch.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return Arguments(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads, kv_channels=arch.head_dim,
        group_query_attention=arch.kv_heads != arch.heads, num_query_groups=arch.kv_heads,
        seq_length=arch.max_positions, max_position_embeddings=arch.max_positions,
        position_embedding_type="rope", use_rotary_position_embeddings=False,
        add_position_embedding=True, rotary_percent=1.0,
        rotary_base=int(rope.theta) if float(rope.theta).is_integer() else rope.theta,
        rotary_interleaved=False, use_rope_scaling=rope.kind == "llama3",
        rope_scaling_factor=rope.factor if rope.kind == "llama3" else 8.0,
        rotary_seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
        normalization="RMSNorm", norm_epsilon=arch.norm_eps, layernorm_epsilon=arch.norm_eps,
        apply_layernorm_1p=False, layernorm_zero_centered_gamma=False, qk_layernorm=arch.qk_norm,
        add_bias_linear=False, add_qkv_bias=arch.qkv_bias, swiglu=True, squared_relu=False,
        quick_geglu=False, untie_embeddings_and_output_weights=not arch.tied,
        apply_query_key_layer_scaling=False, attention_dropout=0.0, hidden_dropout=0.0,
        multi_latent_attention=False, num_experts=None, mtp_num_layers=None, spec=None,
        vocab_size=arch.vocab, padded_vocab_size=padded,
        make_vocab_size_divisible_by=VOCABULARY_MULTIPLE,
        tokenizer_type="HuggingFaceTokenizer" if tokenizer else None, tokenizer_model=None,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, context_parallel_size=1,
        expert_model_parallel_size=1, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16, ckpt_format="torch_dist", iteration=iteration,
        consumed_train_samples=0, consumed_valid_samples=0,
    )  # fmt: skip
