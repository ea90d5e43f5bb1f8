"""The tensors of a decoder-only model in Megatron-Core's names, from its sizes alone.

The planner and the tests use this; a run takes names and shapes from the built model and asks
`cut_of` only how each is cut, so that both see one set of rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.resharding.specs import Cut, TensorSpec


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder; `heads`, `kv_heads` and `vocab` are the padded numbers."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    dtype: str = "bfloat16"


QWEN25_05B = DecoderSizes(
    layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936,
    tied=True, qkv_bias=True,
)  # fmt: skip
LLAMA3_8B = DecoderSizes(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)


def cut_of(name: str, sizes: DecoderSizes) -> Cut:
    """How Megatron-Core cuts a parameter of a decoder.

    Args:
        name: the parameter's name; the last two parts decide ("linear_qkv.weight").

    Raises:
        ValueError: for a name that no rule covers, rather than a guess.
    """
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if "norm" in module or leaf.startswith("layer_norm"):
        return Cut("replicated")
    if module == "linear_qkv":
        return Cut("qkv", heads=sizes.heads, kv_heads=sizes.kv_heads)
    if module == "linear_fc1":
        return Cut("gate_up" if sizes.gated else "rows")
    if module in ("linear_proj", "linear_fc2"):
        # A row-parallel layer adds its bias once, after the sum over ranks: it is not cut.
        return Cut("columns" if leaf == "weight" else "replicated")
    if module in ("word_embeddings", "output_layer"):
        return Cut("vocabulary")
    if module in ("value_head", "reward_head"):
        return Cut("replicated")
    raise ValueError(f"{name}: no rule says how tensor parallelism cuts this parameter")


def decoder_specs(sizes: DecoderSizes) -> tuple[TensorSpec, ...]:
    """Every tensor of the model, in model order."""
    s = sizes
    qkv_rows = (s.heads + 2 * s.kv_heads) * s.head_dim
    per_layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (s.hidden,)}
    per_layer["self_attention.linear_qkv.weight"] = (qkv_rows, s.hidden)
    if s.qkv_bias:
        per_layer["self_attention.linear_qkv.bias"] = (qkv_rows,)
    if s.qk_norm:
        per_layer["self_attention.q_layernorm.weight"] = (s.head_dim,)
        per_layer["self_attention.k_layernorm.weight"] = (s.head_dim,)
    per_layer["self_attention.linear_proj.weight"] = (s.hidden, s.heads * s.head_dim)
    per_layer["pre_mlp_layernorm.weight"] = (s.hidden,)
    per_layer["mlp.linear_fc1.weight"] = ((2 if s.gated else 1) * s.ffn, s.hidden)
    per_layer["mlp.linear_fc2.weight"] = (s.hidden, s.ffn)

    def spec(name: str, shape: tuple[int, ...], placement: str, layer: int | None = None):
        return TensorSpec(name, shape, s.dtype, cut_of(name, s), placement, layer)

    embedding = "first_and_last" if s.tied else "first"
    specs = [spec("embedding.word_embeddings.weight", (s.vocab, s.hidden), embedding)]
    for layer in range(s.layers):
        for leaf, shape in per_layer.items():
            specs.append(spec(f"decoder.layers.{layer}.{leaf}", shape, "layer", layer))
    specs.append(spec("decoder.final_layernorm.weight", (s.hidden,), "last"))
    if not s.tied:
        specs.append(spec("output_layer.weight", (s.vocab, s.hidden), "last"))
    return tuple(specs)
