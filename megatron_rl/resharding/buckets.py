"""The unit of a plan, one block copied from rank to rank, and the buckets that blocks travel in.

A bucket is what one exchange sends. Its size bounds the staging memory, and filling it across
tensors keeps the number of exchanges a matter of bytes, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SPLIT_ALIGNMENT = 256
LOCAL = -1
"""Bucket number of a copy that stays on its rank."""


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` runs of `row_bytes` bytes; offsets and strides in bytes within the two shards."""

    src_offset: int
    dst_offset: int
    rows: int
    row_bytes: int
    src_stride: int
    dst_stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block of tensor number `tensor`, from rank `src` to rank `dst`, sent in `bucket`."""

    tensor: int
    src: int
    dst: int
    bucket: int
    block: Block


class BucketFiller:
    """Puts transfers, tensor by tensor, into buckets that no rank receives too much in."""

    def __init__(self, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
        self.bucket_bytes = bucket_bytes
        self.num_buckets = 0
        self._filled: dict[int, int] = {}

    def add(self, name: str, transfers: list[Transfer]) -> list[Transfer]:
        """One tensor's transfers, with their buckets; a tensor over the bound is split."""
        if not transfers:
            return []
        demand = _received([t.dst for t in transfers], [t.block.nbytes for t in transfers])
        if max(demand.values()) > self.bucket_bytes:
            return self._add_split(name, transfers, demand)
        over = any(self._filled.get(r, 0) + n > self.bucket_bytes for r, n in demand.items())
        if over or not self.num_buckets:
            self._open()
        for rank, nbytes in demand.items():
            self._filled[rank] = self._filled.get(rank, 0) + nbytes
        return [replace(t, bucket=self.num_buckets - 1) for t in transfers]

    def _open(self) -> None:
        self.num_buckets += 1
        self._filled = {}

    def _add_split(
        self, name: str, transfers: list[Transfer], demand: dict[int, int]
    ) -> list[Transfer]:
        parts = -(-max(demand.values()) // self.bucket_bytes)
        finest = max(_most_parts(t.block) for t in transfers)
        while True:
            pieces = [_split(t.block, parts) for t in transfers]
            sizes = _part_sizes([t.dst for t in transfers], pieces)
            if all(max(s.values()) <= self.bucket_bytes for s in sizes):
                break
            if parts >= finest:
                raise ValueError(
                    f"bucket_bytes={self.bucket_bytes} is less than the smallest part of {name} "
                    "that can be sent at once; give a larger bucket"
                )
            parts += 1
        placed = []
        for part, filled in enumerate(sizes):
            self._open()
            self._filled = filled
            placed.extend(
                replace(t, bucket=self.num_buckets - 1, block=p[part])
                for t, p in zip(transfers, pieces, strict=True)
                if part < len(p)
            )
        return placed


def _received(ranks: Sequence[int], nbytes: Sequence[int]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for rank, n in zip(ranks, nbytes, strict=True):
        totals[rank] = totals.get(rank, 0) + n
    return totals


def _part_sizes(ranks: Sequence[int], pieces: Sequence[Sequence[Block]]) -> list[dict[int, int]]:
    """Bytes that every rank receives in each part of a split tensor."""
    return [
        _received(ranks, [p[part].nbytes if part < len(p) else 0 for p in pieces])
        for part in range(max(map(len, pieces)))
    ]


def _most_parts(block: Block) -> int:
    return block.rows if block.rows > 1 else -(-block.row_bytes // SPLIT_ALIGNMENT)


def _split(block: Block, parts: int) -> list[Block]:
    """At most `parts` blocks that make up `block`, cut at rows or at aligned bytes."""
    if block.rows > 1:
        step = -(-block.rows // parts)
        return [
            replace(
                block,
                src_offset=block.src_offset + first * block.src_stride,
                dst_offset=block.dst_offset + first * block.dst_stride,
                rows=min(step, block.rows - first),
            )
            for first in range(0, block.rows, step)
        ]
    step = -(-block.row_bytes // parts)
    step = -(-step // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT
    pieces = []
    for first in range(0, block.row_bytes, step):
        size = min(step, block.row_bytes - first)
        pieces.append(
            Block(block.src_offset + first, block.dst_offset + first, 1, size, size, size)
        )
    return pieces
