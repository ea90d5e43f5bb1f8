"""Which rank holds which part of a model: one grid of ranks for training, one for generation.

Ranks are numbered as Megatron-Core numbers them: the tensor axis runs fastest, then data, then
pipeline. A grid with strides above one is a generation grid laid over a wider training grid, the
zero-redundancy grouping of HybridFlow (Sheng et al., 2024, section 5.3): its tensor-parallel groups
take every `tp_stride`-th rank and its pipeline groups every `pp_stride`-th stage, so that the part
of the model a rank trains lies inside the part it generates with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Coordinate(NamedTuple):
    """Where a rank stands: its tensor and pipeline rank, and the replica it belongs to."""

    tp: int
    pp: int
    replica: int


@dataclass(frozen=True)
class ShardGrid:
    """A layout of `world_size` ranks.

    Args:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline stage (1 without interleaving).
        dp: training replicas. Ranks of different training replicas never exchange weights.
        tp_stride: distance, on the tensor axis, of neighbours in one tensor-parallel group.
        pp_stride: distance, on the pipeline axis, of neighbours in one pipeline group.
        layer_split: layers of each model chunk, in model order, `pp * vpp` entries; chunk c lies on
            stage c % pp. None splits evenly.
        replicate_kv: with fewer KV heads than `tp`, give every rank its whole KV head (a copy)
            instead of cutting through the head as Megatron-Core's `linear_qkv` does.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    tp_stride: int = 1
    pp_stride: int = 1
    layer_split: tuple[int, ...] | None = None
    replicate_kv: bool = False

    def __post_init__(self) -> None:
        for field in ("tp", "pp", "vpp", "dp", "tp_stride", "pp_stride"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}={value!r}: a grid axis is a whole number of at least 1")
        if self.layer_split is None:
            return
        if len(self.layer_split) != self.pp * self.vpp or min(self.layer_split) < 0:
            raise ValueError(
                f"layer_split={self.layer_split}: pp={self.pp} and vpp={self.vpp} need "
                f"{self.pp * self.vpp} layer counts of at least 0, one for each model chunk"
            )

    @property
    def tp_width(self) -> int:
        """Ranks side by side on the tensor axis: one or more tensor-parallel groups."""
        return self.tp * self.tp_stride

    @property
    def pp_width(self) -> int:
        """Ranks on the pipeline axis: one or more pipelines."""
        return self.pp * self.pp_stride

    @property
    def world_size(self) -> int:
        return self.tp_width * self.pp_width * self.dp

    @property
    def micro_dp_size(self) -> int:
        """Replicas of the model inside one training replica."""
        return self.tp_stride * self.pp_stride

    def axes(self, rank: int) -> tuple[int, int, int]:
        """(position on the tensor axis, on the data axis, on the pipeline axis) of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        outer, across = divmod(rank, self.tp_width)
        down, data = divmod(outer, self.dp)
        return across, data, down

    def coordinate(self, rank: int) -> Coordinate:
        across, data, down = self.axes(rank)
        tp, micro_tp = divmod(across, self.tp_stride)
        pp, micro_pp = divmod(down, self.pp_stride)
        micro = micro_pp * self.tp_stride + micro_tp
        return Coordinate(tp, pp, data * self.micro_dp_size + micro)

    def block(self, data: int) -> tuple[int, ...]:
        """The ranks at one position of the data axis: one training replica, rising."""
        if not 0 <= data < self.dp:
            raise ValueError(f"replica={data}: the grid has dp={self.dp} training replicas")
        return tuple(r for r in range(self.world_size) if self.axes(r)[1] == data)

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each tensor-parallel group, in tensor-rank order."""
        return self._groups(lambda c: (c.replica, c.pp))

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each pipeline group, in stage order."""
        return self._groups(lambda c: (c.replica, c.tp))

    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold one whole copy of the model together."""
        return self._groups(lambda c: c.replica)

    def micro_dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of one training replica that hold the same part of the model."""
        return self._groups(lambda c: (c.replica // self.micro_dp_size, c.tp, c.pp))

    def _groups(self, key) -> tuple[tuple[int, ...], ...]:
        groups: dict[object, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(self.coordinate(rank)), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def chunk_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each model chunk in model order, checked against the number of layers."""
        chunks = self.pp * self.vpp
        if self.layer_split is not None:
            if sum(self.layer_split) != num_layers:
                raise ValueError(
                    f"layer_split={self.layer_split} adds up to {sum(self.layer_split)} layers, "
                    f"the model has {num_layers}"
                )
            return self.layer_split
        if num_layers % chunks:
            raise ValueError(
                f"{num_layers} layers do not divide by pp={self.pp} x vpp={self.vpp}: "
                "give layer_split, the layers of each model chunk"
            )
        return (num_layers // chunks,) * chunks

    def layer_stages(self, num_layers: int) -> tuple[int, ...]:
        """The pipeline stage of every layer."""
        return _layer_stages(self, num_layers)


@lru_cache(maxsize=64)
def _layer_stages(grid: ShardGrid, num_layers: int) -> tuple[int, ...]:
    sizes = grid.chunk_sizes(num_layers)
    return tuple(chunk % grid.pp for chunk, size in enumerate(sizes) for _ in range(size))


def generation_grid(
    train: ShardGrid,
    *,
    tp: int,
    pp: int = 1,
    num_layers: int | None = None,
    replicate_kv: bool | None = None,
) -> ShardGrid:
    """The zero-redundancy generation grid over a training grid.

    Args:
        train: the training grid (strides 1).
        tp: generation tensor-parallel size, a divisor of `train.tp`.
        pp: generation pipeline size, a divisor of `train.pp`.
        num_layers: layers of the model; needed when `train` has a pipeline to merge.
        replicate_kv: see `ShardGrid`; None keeps the training grid's choice.

    Raises:
        ValueError: when a generation size does not divide the training size.
    """
    if train.micro_dp_size != 1:
        raise ValueError("a generation grid is laid over a training grid, not over another one")
    for field, small, large in (("tp", tp, train.tp), ("pp", pp, train.pp)):
        if small < 1 or large % small:
            fits = [n for n in range(1, large + 1) if large % n == 0]
            raise ValueError(
                f"generation {field}={small} does not divide the training {field}={large}: "
                f"choose one of {fits}"
            )
    split, vpp = None, 1
    if pp > 1:
        # Interleaving stays: chunk v of a generation stage joins chunks v of the stages it merges,
        # which keeps every rank's training layers inside its generation layers.
        vpp, merged = train.vpp, train.pp // pp
        if num_layers is None:
            raise ValueError("num_layers is needed to merge the stages of a pipeline")
        sizes = train.chunk_sizes(num_layers)
        split = tuple(sum(sizes[i : i + merged]) for i in range(0, len(sizes), merged))
    return ShardGrid(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=train.dp,
        tp_stride=train.tp // tp,
        pp_stride=train.pp // pp,
        layer_split=split,
        replicate_kv=train.replicate_kv if replicate_kv is None else replicate_kv,
    )
