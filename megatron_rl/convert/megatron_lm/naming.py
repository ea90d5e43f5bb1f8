"""Between Megatron-LM's tensor names and the ones of this project (convert/names.py).

Transformer Engine keeps a norm in the linear layer behind it (`linear_qkv.layer_norm_weight`),
Megatron's local layers keep it beside (`input_layernorm.weight`, our names). Of a `torch_dist`
folder, equal layers make up one tensor with a leading axis over the layers
(`decoder.layers.mlp.linear_fc2.weight`); in other folders the names hold the layer's number.
"""

from __future__ import annotations

import re

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_WITH_NORM = {ours: theirs for theirs, ours in _FUSED_NORMS.items()}
_LAYERS = "decoder.layers."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NOT_OF_THE_MODEL = ("optimizer", "chained_", "opt_param_scheduler", "rng_state", "rerun_state")


def of_the_model(name: str) -> bool:
    """False for optimizer and random states and for what Transformer Engine keeps for FP8."""
    return not name.startswith(_NOT_OF_THE_MODEL) and "_extra_state" not in name


def our_name(name: str) -> str:
    """A Megatron-LM name in our spelling; the layer number, or its absence, stays."""
    name = name.removeprefix("module.")
    for theirs, ours in _FUSED_NORMS.items():
        if name.startswith(_LAYERS) and name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + ours
    return name


def split_layer(name: str) -> tuple[str, int | None]:
    """Name without its layer number, and the number (None outside the layers)."""
    match = _LAYER.fullmatch(name)
    return (f"{_LAYERS}{match[2]}", int(match[1])) if match else (name, None)


def with_layer(name: str, layer: int) -> str:
    """`decoder.layers.x` → `decoder.layers.{layer}.x`; other names stay."""
    return f"{_LAYERS}{layer}.{name.removeprefix(_LAYERS)}" if name.startswith(_LAYERS) else name


def megatron_lm_name(name: str) -> str:
    """Our name without its layer number, as Megatron-LM's `torch_dist` folders spell it.

    Both of its layer implementations read the fused spelling there.
    """
    rest = name.removeprefix(_LAYERS)
    return _LAYERS + _WITH_NORM.get(rest, rest) if name.startswith(_LAYERS) else name
