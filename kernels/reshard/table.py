"""Blocks to copy, and the table of them that a kernel walks.

Work is cut into tiles of `LANES` units; one program copies one tile. A unit is 16 bytes where every
address, stride and row width of a block is a multiple of 16, and one byte otherwise. Within a tile
the lanes stand as (LANES / width) rows by `width` columns, width a power of two chosen per block so
that few lanes fall outside its rows: a contiguous block is one long row, a slice of a
row-parallel weight is thousands of short ones, and both keep the lanes busy.

Descriptor, eight int64 per block (`desc_B8`):
  0 source address   1 destination address   2 rows   3 units in a row
  4 source stride in bytes   5 destination stride in bytes   6 first tile   7 width code
where the width code is log2(width), plus BYTE_UNITS for blocks whose unit is one byte. `tile_T`
names the block of every tile.

Shape suffixes: B blocks, T tiles, 8 descriptor fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

LANES = 2048
VECTOR = 16
BYTE_UNITS = 32
MAX_IDLE = 1.04


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`rows` runs of `row_bytes` bytes from `src` to `dst`; everything else in bytes too.

    Args:
        src: in, contiguous, any dtype. Offsets count from its first element.
        dst: out, contiguous, any dtype, on the same device, not overlapping `src`.
        src_offset, dst_offset: where the first run starts.
        rows, row_bytes: how many runs, how long each.
        src_stride, dst_stride: distance between the starts of two runs.
    """

    src: torch.Tensor
    dst: torch.Tensor
    src_offset: int
    dst_offset: int
    rows: int
    row_bytes: int
    src_stride: int
    dst_stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def check(self) -> None:
        """Raise ValueError where the block reaches outside a tensor or could not be copied."""
        if self.src.device != self.dst.device:
            raise ValueError(f"src is on {self.src.device}, dst on {self.dst.device}")
        if self.rows < 1 or self.row_bytes < 1:
            raise ValueError(f"a block of {self.rows} rows of {self.row_bytes} bytes is empty")
        sides = (("src", self.src, self.src_offset, self.src_stride),
                 ("dst", self.dst, self.dst_offset, self.dst_stride))  # fmt: skip
        for side, tensor, offset, stride in sides:
            if not tensor.is_contiguous():
                raise ValueError(f"{side} is not contiguous: shape {tuple(tensor.shape)}, "
                                 f"strides {tensor.stride()}")  # fmt: skip
            if self.rows > 1 and stride < self.row_bytes:
                raise ValueError(f"{side}_stride={stride} is shorter than a row of "
                                 f"{self.row_bytes} bytes: its rows overlap")  # fmt: skip
            end = offset + (self.rows - 1) * stride + self.row_bytes
            if offset < 0 or end > tensor.nbytes:
                raise ValueError(
                    f"the block covers bytes {offset} to {end} of {side}, which has {tensor.nbytes}"
                )


class CopyTable:
    """A fixed list of copies, prepared once and run as often as needed.

    Args:
        copies: the blocks; their destinations must not overlap (blocks run in any order).
        lanes: units per tile, a power of two.

    Addresses are read when the table is first used on a device. Where a tensor has moved since
    (its storage was released and taken again), `stale()` is True and the table must be rebuilt.
    """

    def __init__(self, copies: Sequence[BlockCopy], lanes: int = LANES) -> None:
        for copy in copies:
            copy.check()
        devices = {copy.src.device for copy in copies}
        if len(devices) > 1:
            raise ValueError(f"one table copies on one device, not on {sorted(map(str, devices))}")
        self.copies = tuple(copies)
        self.lanes = lanes
        self.nbytes = sum(copy.nbytes for copy in copies)
        tensors = {id(t): t for copy in copies for t in (copy.src, copy.dst)}
        self._addresses = [(tensor, tensor.data_ptr()) for tensor in tensors.values()]

    def stale(self) -> bool:
        return any(tensor.data_ptr() != address for tensor, address in self._addresses)

    @cached_property
    def device_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(desc_B8 int64, tile_T int32) on the copies' device."""
        rows, counts, first = [], [], 0
        for copy in self.copies:
            unit = VECTOR if _aligned(copy) else 1
            units = copy.row_bytes // unit
            log2 = _log2_width(units, self.lanes)
            per_tile = self.lanes >> log2
            tiles = -(-copy.rows // per_tile) * -(-units // (1 << log2))
            rows.append((
                copy.src.data_ptr() + copy.src_offset, copy.dst.data_ptr() + copy.dst_offset,
                copy.rows, units, copy.src_stride, copy.dst_stride, first,
                log2 + (0 if unit == VECTOR else BYTE_UNITS),
            ))  # fmt: skip
            counts.append(tiles)
            first += tiles
        if max(first, *(max(r[2], r[3]) for r in rows)) >= 2**31:
            raise ValueError("rows, row units and tiles of a table must stay below 2^31: split it")
        device = self.copies[0].src.device
        blocks = torch.arange(len(rows), dtype=torch.int32)
        tile_T = torch.repeat_interleave(blocks, torch.tensor(counts))
        return torch.tensor(rows, dtype=torch.int64).to(device), tile_T.to(device)


def _aligned(copy: BlockCopy) -> bool:
    numbers = [copy.src.data_ptr() + copy.src_offset, copy.dst.data_ptr() + copy.dst_offset]
    numbers.append(copy.row_bytes)
    if copy.rows > 1:
        numbers += [copy.src_stride, copy.dst_stride]
    return all(n % VECTOR == 0 for n in numbers)


def _log2_width(units: int, lanes: int) -> int:
    """log2 of the widest power of two that leaves at most 4 % of the lanes without work.

    Where none does, the one that leaves the fewest; wide rows of lanes make long transactions.
    """
    top = lanes.bit_length() - 1
    covered = {log2: -(-units // (1 << log2)) << log2 for log2 in range(top, 2, -1)}
    for log2, lanes_used in covered.items():
        if lanes_used <= MAX_IDLE * units:
            return log2
    return min(covered, key=lambda log2: (covered[log2], -log2))
