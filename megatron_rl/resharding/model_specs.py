"""What a built model looks like to the planner: specs from its architecture, shards by spec name.

Names are Megatron-Core's with global layer numbers. Tied embeddings are one tensor to the planner;
in the model they are two parameters when first and last stage differ.
"""

from __future__ import annotations

import torch

from megatron_rl.models.architecture import Architecture
from megatron_rl.models.gpt import DTYPES, ParallelModel
from megatron_rl.parallel import Layout
from megatron_rl.resharding.decoder import DecoderSizes, decoder_specs
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.specs import TensorSpec

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def model_specs(arch: Architecture, *, tp: int, dtype: str) -> tuple[TensorSpec, ...]:
    """Every tensor of a language model, with the padding of a tensor parallel size."""
    sizes = DecoderSizes(
        layers=arch.layers, hidden=arch.hidden, ffn=arch.ffn, heads=arch.padded_heads(tp),
        kv_heads=arch.padded_kv_heads(tp), head_dim=arch.head_dim, vocab=arch.padded_vocab(tp),
        tied=arch.tied, qkv_bias=arch.qkv_bias, qk_norm=arch.qk_norm,
        dtype=str(DTYPES[dtype]).removeprefix("torch."),
    )  # fmt: skip
    return decoder_specs(sizes)


def grid_of(layout: Layout) -> ShardGrid:
    """A training layout as the planner's grid."""
    return ShardGrid(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, dp=layout.dp)


def check_generation_layout(
    arch: Architecture, *, tp: int, pp: int, vpp: int, generation_tp: int, generation_pp: int
) -> None:
    """Refuses a generation layout that some tensor can't be cut for; no communication.

    Raises:
        ValueError: naming the tensor, or the sizes that fit.
    """
    train = ShardGrid(tp=tp, pp=pp, vpp=vpp)
    grid = generation_grid(train, tp=generation_tp, pp=generation_pp, num_layers=arch.layers)
    for spec in model_specs(arch, tp=tp, dtype="fp32"):
        for rank in range(generation_tp):
            spec.intervals(grid.tp, rank, grid.replicate_kv)


def weights_by_spec(
    model: ParallelModel, specs: tuple[TensorSpec, ...]
) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names of the specs.

    Raises:
        ValueError: for a parameter that no spec describes.
    """
    known = {spec.name for spec in specs}
    found = {}
    for name, parameter in model.named_parameters():
        name = _EMBEDDING if name == _OUTPUT and model.arch.tied else name
        if name not in known:
            raise ValueError(
                f"{name}: no rule says how to move this parameter to another layout; generate with "
                "hybrid_engine.mode=zero_repartitioning"
            )
        found[name] = parameter
    return found
