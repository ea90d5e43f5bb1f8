"""Where the elements of one rank's tensor lie in the whole tensor, as data.

A checkpoint stores whole tensors without the padding that a layout adds (vocabulary rows, heads),
so that any layout can read it. Tensor parallelism gives a rank a band of rows or columns; the
distributed optimizer gives it a range [start, stop) of that band, flattened. Such a range is cut
into at most three rectangles (a partial first row, whole rows, a partial last row), and every
rectangle is a rectangle of the whole tensor. So each rank writes and reads exactly what it holds,
without gathering anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_rl.convert.names import (
    Columns,
    ExpertDown,
    ExpertGateUp,
    GateUp,
    QueryKeyValue,
    Replicated,
    Rule,
    Vocabulary,
)
from megatron_rl.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """`length` entries of the cut axis: local ones from `local`, global ones from `whole`."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a rank's tensor lies in the whole one.

    Attributes:
        shape: the whole tensor, without padding.
        local_shape: this rank's tensor, padding included.
        axis: the axis that tensor parallelism cuts.
        bands: what of the local tensor is real, rising; empty on a rank that holds padding only.
        replicated: True when all tensor parallel ranks hold the same.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axis: int
    bands: tuple[Band, ...]
    replicated: bool

    @property
    def padded(self) -> bool:
        """True when part of the local tensor is padding."""
        return sum(b.length for b in self.bands) < self.local_shape[self.axis]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of the whole tensor and the local data that fills it (a view)."""

    offset: tuple[int, ...]
    data: Tensor


def cut_of(
    rule: Rule, arch: Architecture, local_shape: tuple[int, ...], *, tp: int, rank: int
) -> Cut:
    """The cut of a parameter that `rule` describes, for tensor parallel rank `rank` of `tp`."""
    axis, size = (1 if isinstance(rule, Columns) else 0), 0
    match rule:
        case Replicated():
            size = local_shape[0]
            starts = [(0, 0, size)]
        case GateUp():
            size, rows = 2 * arch.ffn, local_shape[0] // 2
            starts = [(0, rank * rows, rows), (rows, arch.ffn + rank * rows, rows)]
        case Vocabulary():
            size = arch.vocab
        case QueryKeyValue():
            size = arch.kv_heads * (arch.heads_per_group + 2) * arch.head_dim
        case ExpertGateUp() | ExpertDown():
            halves = 2 if isinstance(rule, ExpertGateUp) else 1
            size = arch.experts.count * halves * arch.ffn
            experts, rows, first = rule.experts_of(arch, tp, rank)
            blocks = range(halves * experts.start, halves * experts.stop)
            starts = [(i * rows, b * arch.ffn + first, rows) for i, b in enumerate(blocks)]
        case Columns():
            size = arch.heads * arch.head_dim if rule.heads else arch.ffn
    if isinstance(rule, Vocabulary | QueryKeyValue | Columns):
        length = local_shape[axis]
        starts = [(0, rank * length, length)]
    bands = [
        Band(local=local, whole=whole, length=min(length, size - whole))
        for local, whole, length in starts
        if whole < size
    ]
    shape = list(local_shape)
    shape[axis] = size
    return Cut(
        shape=tuple(shape), local_shape=tuple(local_shape), axis=axis, bands=tuple(bands),
        replicated=tp == 1 or isinstance(rule, Replicated),
    )  # fmt: skip


def rectangles(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts the flat range [start, stop) of a row-major tensor into (offset, size) rectangles.

    Args:
        shape: one or two dimensions.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    columns = shape[1]
    found = []
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:
            width = min(columns - column, stop - start)
            found.append(((row, column), (1, width)))
        else:
            width = (stop - start) // columns * columns
            found.append(((row, 0), (width // columns, columns)))
        start += width
    return found


def pieces(cut: Cut, flat: Tensor, start: int) -> list[Piece]:
    """The rectangles of the whole tensor that `flat` fills.

    Args:
        flat: one-dimensional; elements [start, start + len) of the flattened local tensor.
    """
    found = []
    for offset, size in rectangles(cut.local_shape, start, start + flat.numel()):
        first = offset[0] if len(offset) == 1 else offset[0] * cut.local_shape[1] + offset[1]
        block = flat[first - start : first - start + prod(size)].view(size)
        for band in cut.bands:
            low = max(offset[cut.axis], band.local)
            high = min(offset[cut.axis] + size[cut.axis], band.local + band.length)
            if low < high:
                place = list(offset)
                place[cut.axis] = band.whole + low - band.local
                data = block.narrow(cut.axis, low - offset[cut.axis], high - low)
                found.append(Piece(offset=tuple(place), data=data))
    return found
