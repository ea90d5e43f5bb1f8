"""How many bytes each scheme of going from training to generation moves and holds, per GPU.

With M the bytes of the model, training layout t (tensor) x p (pipeline) x d (data) and generation
layout t_g x p_g, after HybridFlow (Sheng et al., 2024, table 2):

  scheme                                     received per GPU              peak weights   redundant
  DeepSpeed-Chat (gather over all ranks)     (tpd - 1)/(tpd) M             M              M/(tpd)
  whole all-gather inside the replica        (tp - 1)/(tp) M               M              M/(tp)
  micro-DP, zero-redundancy grouping         (tp - t_g p_g)/(t_g p_g tp) M M/(t_g p_g)    0
  zero repartitioning (same layout)          0                             M/(tp)         0

The formulas take every byte of the model as cut over all t·p ranks. Real models have tensors that
tensor parallelism copies (norms: never sent again) and stages of unequal size (embeddings), so
what a rank really receives is stated by `received_bytes`, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from megatron_rl.resharding.grid import ShardGrid
from megatron_rl.resharding.plan import count_layers
from megatron_rl.resharding.specs import TensorSpec


def deepspeed_chat_bytes(model_bytes: int, t: int, p: int, d: int) -> Fraction:
    """Received per GPU when the whole model is gathered from every rank."""
    _check(t=t, p=p, d=d)
    return Fraction(model_bytes * (t * p * d - 1), t * p * d)


def whole_all_gather_bytes(model_bytes: int, t: int, p: int) -> Fraction:
    """Received per GPU when the whole model is gathered inside a training replica."""
    _check(t=t, p=p)
    return Fraction(model_bytes * (t * p - 1), t * p)


def micro_dp_bytes(model_bytes: int, t: int, p: int, t_g: int, p_g: int) -> Fraction:
    """Received per GPU with zero-redundancy micro-DP groups.

    Raises:
        ValueError: when t_g does not divide t, or p_g does not divide p.
    """
    _check(t=t, p=p, t_g=t_g, p_g=p_g)
    if t % t_g or p % p_g:
        raise ValueError(f"t_g={t_g} must divide t={t}, and p_g={p_g} must divide p={p}")
    return Fraction(model_bytes * (t * p - t_g * p_g), t_g * p_g * t * p)


def peak_weight_bytes(model_bytes: int, t_g: int, p_g: int) -> Fraction:
    """Bytes of generation weights per GPU, the training shard inside them included."""
    _check(t_g=t_g, p_g=p_g)
    return Fraction(model_bytes, t_g * p_g)


def received_bytes(specs: Sequence[TensorSpec], train: ShardGrid, gen: ShardGrid, rank: int) -> int:
    """Exact bytes that a rank receives, from the sizes of its shards alone.

    Independent of `make_plan`: what it needs minus what of that it has. Tensor ranges are compared
    entry by entry, so this is for checks and reports, not for inner loops.
    """
    layers = count_layers(specs)
    total = 0
    for spec in specs:
        needed, held = (_entries(spec, grid, rank, layers) for grid in (gen, train))
        axis = spec.cut.axis
        total += spec.nbytes // spec.shape[axis] * len(needed - held)
    return total


def _entries(spec: TensorSpec, grid: ShardGrid, rank: int, layers: int) -> set[int]:
    at = grid.coordinate(rank)
    if at.pp not in spec.stages(grid.pp, grid.layer_stages(layers)):
        return set()
    return {
        entry
        for start, length in spec.intervals(grid.tp, at.tp, grid.replicate_kv)
        for entry in range(start, start + length)
    }


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: a parallel size is at least 1")
