"""From a Hugging Face `config.json` to the architecture that this project builds.

Every field of the file either changes the function (and is honoured), is known not to (and is
ignored), or is refused by name: nothing is dropped silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.models.architecture import Architecture, Experts, Rope

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_SHAPE_FIELDS = {
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_act",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "attention_dropout", "rope_interleaved", "use_mrope",
}  # fmt: skip
_EXPERT_FIELDS = {
    "mixtral": {"num_local_experts", "num_experts_per_tok", "router_jitter_noise"},
    "qwen3_moe": {
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    },
}  # fmt: skip
_ROUTER_LOSS = {"output_router_logits", "router_aux_loss_coef"}
_NEUTRAL_FIELDS = {
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "id2label",
    "label2id", "num_labels", "problem_type", "pretraining_tp", "_name_or_path", "return_dict",
    "output_attentions", "output_hidden_states", "is_decoder", "is_encoder_decoder",
    "chunk_size_feed_forward", "transformers.js_config", "is_llama_config", "finetuning_task",
    "cross_attention_hidden_size", "add_cross_attention", "task_specific_params", "summary_type",
    "_attn_implementation_autoset",
}  # fmt: skip
_WHERE_SILENT: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
"""What transformers assumes where a file does not name a field (null means something else)."""
_ROPE_FIELDS = {
    "default": (), "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip


def read_architecture(folder: str | Path) -> Architecture:
    """Reads `config.json` of a Hugging Face model folder.

    Raises:
        ValueError: if the file is missing, unreadable, of an unknown family, or has a field that
            would change the function and is not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"no config.json in {str(folder)!r}: a Hugging Face model folder holds config.json and "
            "*.safetensors; check the path (model.actor.path and its siblings)"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return architecture_from_config(config, source=str(path))


def architecture_from_config(config: dict[str, Any], *, source: str) -> Architecture:
    """Turns a parsed `config.json` into an `Architecture`; see `read_architecture`."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{source}: model_type is {family!r}, which is not supported; "
            f"known families: {', '.join(sorted(FAMILIES))}"
        )
    config = _WHERE_SILENT[family] | config
    _refuse_unknown_fields(config, source)
    heads = _positive(config, "num_attention_heads", source)
    hidden = _positive(config, "hidden_size", source)
    kv_heads, head_dim = heads, hidden // heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _positive(config, "num_key_value_heads", source)
    if config.get("head_dim") is not None:
        head_dim = _positive(config, "head_dim", source)
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    return Architecture(
        family=family, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        layers=_positive(config, "num_hidden_layers", source),
        ffn=_positive(config, _FFN_FIELD.get(family, "intermediate_size"), source),
        experts=_read_experts(config, source),
        vocab=_positive(config, "vocab_size", source),
        tied=_flag(config, "tie_word_embeddings", source),
        norm_eps=_number(config, "rms_norm_eps", source, 1e-6),
        max_positions=_context(config, source), rope=_read_rope(config, source),
        qkv_bias=family == "qwen2", qk_norm=family in ("qwen3", "qwen3_moe"),
    )  # fmt: skip


_FFN_FIELD = {"qwen3_moe": "moe_intermediate_size"}


def _read_experts(config: dict[str, Any], source: str) -> Experts | None:
    """The mixture of experts of a family that has one."""
    family = config["model_type"]
    if family not in _EXPERT_FIELDS:
        return None
    # transformers calls the number of Qwen3-MoE's experts by either name.
    field = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    count, per_token = (_positive(config, f, source) for f in (field, "num_experts_per_tok"))
    if per_token > count:
        raise ValueError(
            f"{source}: num_experts_per_tok is {per_token}, but there are {count} experts"
        )
    normalised = family == "mixtral" or _flag(config, "norm_topk_prob", source)
    return Experts(count=count, per_token=per_token, normalised=normalised)


def _positive(config: dict[str, Any], field: str, source: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {field} is {value!r}: it must be a positive whole number")
    return value


def _number(config: dict[str, Any], field: str, source: str, default: float | None) -> float:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"{source}: {field} is {value!r}: it must be a positive number")
    return float(value)


def _flag(config: dict[str, Any], field: str, source: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise ValueError(f"{source}: {field} is {value!r}: it must be true or false")
    return value


def _refuse_unknown_fields(config: dict[str, Any], source: str) -> None:
    experts = _EXPERT_FIELDS.get(config["model_type"])
    known = _NEUTRAL_FIELDS | _SHAPE_FIELDS | (experts | _ROUTER_LOSS if experts else set())
    for field, value in config.items():
        if field in known or value is None:
            continue
        raise ValueError(
            f"{source}: the field {field!r} ({value!r}) is not known for this family; it might "
            "change the function, so it is refused (remove it if it has no effect)"
        )
    kinds = {"full_attention"} | ({"sliding_attention"} if _windowed(config) else set())
    refused = {
        "hidden_act": lambda v: v != "silu",
        "attention_bias": bool,
        "mlp_bias": bool,
        "rope_interleaved": bool,
        "use_mrope": bool,
        "attention_dropout": lambda v: v != 0,
        "layer_types": lambda v: not kinds.issuperset(v),
        "decoder_sparse_step": lambda v: v != 1, "mlp_only_layers": bool,
        "router_jitter_noise": bool, "output_router_logits": bool,
    }  # fmt: skip
    for field, is_refused in refused.items():
        if config.get(field) is not None and is_refused(config[field]):
            raise ValueError(
                f"{source}: {field}={config[field]!r} is not supported by this model code"
            )


def _windowed(config: dict[str, Any]) -> bool:
    """Whether some layers attend to the last `sliding_window` tokens only."""
    family, window = config["model_type"], config.get("sliding_window")
    switched_on = family in ("mistral", "mixtral") or (
        family != "llama" and config.get("use_sliding_window")
    )
    return window is not None and bool(switched_on)


def _context(config: dict[str, Any], source: str) -> int:
    """Longest sequence in tokens.

    A sliding window is honoured by staying inside it: up to its length, windowed and full attention
    are the same function.
    """
    positions = _positive(config, "max_position_embeddings", source)
    if not _windowed(config):
        return positions
    return min(positions, _positive(config, "sliding_window", source))


def _read_rope(config: dict[str, Any], source: str) -> Rope:
    """Rotary parameters from `rope_parameters` or, in older files, `rope_theta` and
    `rope_scaling` (which wins where both are given, as in transformers)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise ValueError(
            f"{source}: rope scaling {kind!r} is not supported; known: {', '.join(_ROPE_FIELDS)}"
        )
    known = {"rope_theta", "rope_type", "type", "factor", *_ROPE_FIELDS[kind]}
    unknown = {key for key, value in scaling.items() if value is not None} - known
    if unknown:
        raise ValueError(f"{source}: rope parameters {sorted(unknown)} are not supported")
    values = {name: _number(scaling, name, source, None) for name in _ROPE_FIELDS[kind]}
    if "original_max_position_embeddings" in values:
        values["original_max_positions"] = int(values.pop("original_max_position_embeddings"))
    theta_in = config if scaling.get("rope_theta") is None else scaling
    return Rope(theta=_number(theta_in, "rope_theta", source, 10000.0), kind=kind, **values)


def config_json(arch: Architecture, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of an exported model (used where no source folder is at hand)."""
    rope: dict[str, Any] = {"rope_theta": arch.rope.theta, "rope_type": arch.rope.kind}
    if arch.rope.kind != "default":
        rope["factor"] = arch.rope.factor
    if arch.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": arch.rope.low_freq_factor,
            "high_freq_factor": arch.rope.high_freq_factor,
            "original_max_position_embeddings": arch.rope.original_max_positions,
        }
    written = {
        "architectures": [FAMILIES[arch.family]], "model_type": arch.family, "dtype": dtype,
        "hidden_size": arch.hidden, "num_hidden_layers": arch.layers, "hidden_act": "silu",
        "num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim, "intermediate_size": arch.ffn, "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied, "rms_norm_eps": arch.norm_eps,
        "rope_parameters": rope, "max_position_embeddings": arch.max_positions,
    }  # fmt: skip
    if arch.family in ("mistral", "mixtral"):
        written["sliding_window"] = None
    if arch.experts is not None:
        written["num_experts_per_tok"] = arch.experts.per_token
    if arch.family == "mixtral":
        written["num_local_experts"] = arch.experts.count
    if arch.family == "qwen3_moe":
        written |= {
            "num_experts": arch.experts.count, "norm_topk_prob": arch.experts.normalised,
            "moe_intermediate_size": arch.ffn,
        }  # fmt: skip
    return written
