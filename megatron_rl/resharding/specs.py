"""What a tensor is and how tensor parallelism cuts it, as data.

Every cut is described by intervals of one axis of the *global* tensor in Megatron-Core's own order,
so that two layouts are compared by intersecting intervals, whatever interleaving a shard has:

  replicated  every rank holds the whole tensor
  rows        rank r holds rows [r·n/tp, (r+1)·n/tp)
  columns     the same along axis 1 (row-parallel linear layers)
  vocabulary  rows, the vocabulary padded so that it divides; padding rows travel like any other
  gate_up     the global rows are [gate; up]; rank r holds [gate_r; up_r]
  qkv         the global rows go group by group, [q × heads/kv_heads, k, v] for each KV head. With
              kv_heads a multiple of tp a rank holds whole groups. With fewer KV heads it holds
              1/tp of the rows, cut through a group (Megatron-Core), or, with
              `ShardGrid.replicate_kv`, its query heads and a copy of their k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

CutKind = Literal["replicated", "rows", "columns", "vocabulary", "gate_up", "qkv"]
Placement = Literal["layer", "first", "last", "first_and_last", "every"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class Interval(NamedTuple):
    """`length` entries of the cut axis from `start` on, in the global tensor."""

    start: int
    length: int


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a tensor; head counts (padded heads included) for `qkv` only."""

    kind: CutKind
    heads: int = 0
    kv_heads: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("replicated", "rows", "columns", "vocabulary", "gate_up", "qkv"):
            raise ValueError(f"cut {self.kind!r} is not one of {CutKind.__args__}")
        if self.kind == "qkv" and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(
                f"a qkv cut needs heads ({self.heads}) as a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def axis(self) -> int:
        return 1 if self.kind == "columns" else 0


@dataclass(frozen=True)
class TensorSpec:
    """One parameter of the whole model.

    Args:
        name: the same on every rank, with the layer's index in the whole model.
        shape: the global shape, padding of vocabulary and heads included.
        dtype: torch's name without "torch.", for example "bfloat16".
        cut: how tensor parallelism cuts it.
        placement: the pipeline stages that hold it: that of its `layer`, the first, the last, both
            (tied embeddings: one tensor in two places), or every stage.
        layer: index of its layer in the model, for placement "layer".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: Cut
    placement: Placement = "layer"
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is not one of {list(DTYPE_BYTES)}")
        if (self.placement == "layer") != (self.layer is not None):
            raise ValueError(f"{self.name}: placement 'layer' and a layer index go together")
        if len(self.shape) <= self.cut.axis:
            raise ValueError(f"{self.name}: shape {self.shape} has no axis {self.cut.axis} to cut")

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.element_bytes

    def stages(self, pp: int, layer_stages: tuple[int, ...]) -> tuple[int, ...]:
        """The pipeline stages that hold it, rising."""
        if self.placement == "layer":
            return (layer_stages[self.layer],)
        if self.placement == "every":
            return tuple(range(pp))
        first = (0,) if self.placement in ("first", "first_and_last") else ()
        last = (pp - 1,) if self.placement in ("last", "first_and_last") else ()
        return tuple(sorted({*first, *last}))

    def intervals(self, tp: int, tp_rank: int, replicate_kv: bool = False) -> tuple[Interval, ...]:
        """What tensor rank `tp_rank` of `tp` holds, in the order in which it holds it.

        Raises:
            ValueError: when the tensor cannot be cut that way; the message names it.
        """
        try:
            length = self.shape[self.cut.axis]
            return _intervals(self.cut, length, tp, tp_rank, replicate_kv)
        except ValueError as error:
            raise ValueError(f"{self.name} {self.shape}: {error}") from None

    def shard_shape(self, tp: int, tp_rank: int, replicate_kv: bool = False) -> tuple[int, ...]:
        """Shape of a tensor rank's shard."""
        shape = list(self.shape)
        axis = self.cut.axis
        shape[axis] = sum(i.length for i in self.intervals(tp, tp_rank, replicate_kv))
        return tuple(shape)


@lru_cache(maxsize=65536)
def _intervals(
    cut: Cut, length: int, tp: int, rank: int, replicate_kv: bool
) -> tuple[Interval, ...]:
    if cut.kind == "replicated":
        return (Interval(0, length),)
    if cut.kind == "gate_up":
        share = _divide(length, 2 * tp, "gate and up rows")
        return (Interval(rank * share, share), Interval(length // 2 + rank * share, share))
    if cut.kind == "qkv":
        return _qkv_intervals(cut, length, tp, rank, replicate_kv)
    share = _divide(length, tp, "columns" if cut.kind == "columns" else "rows")
    return (Interval(rank * share, share),)


def _qkv_intervals(
    cut: Cut, length: int, tp: int, rank: int, replicate_kv: bool
) -> tuple[Interval, ...]:
    head_rows = _divide(length, cut.heads + 2 * cut.kv_heads, "query, key and value heads")
    if cut.kv_heads % tp == 0:
        share = length // tp
        return (Interval(rank * share, share),)
    if tp % cut.kv_heads:
        raise ValueError(f"{cut.kv_heads} KV heads neither divide nor are divided by tp={tp}")
    if not replicate_kv:
        share = _divide(length, tp, "rows")
        return (Interval(rank * share, share),)
    queries = _divide(cut.heads, tp, "query heads")
    sharing = tp // cut.kv_heads
    group_heads = cut.heads // cut.kv_heads
    group, member = divmod(rank, sharing)
    start = group * (group_heads + 2) * head_rows
    q = Interval(start + member * queries * head_rows, queries * head_rows)
    kv = Interval(start + group_heads * head_rows, 2 * head_rows)
    if q.start + q.length == kv.start:
        return (Interval(q.start, q.length + kv.length),)
    return (q, kv)


def _divide(length: int, parts: int, what: str) -> int:
    if length % parts:
        raise ValueError(f"{length} {what} do not divide into {parts} equal parts")
    return length // parts
