"""Triton kernel of the block copy: one program per tile, descriptors read from device memory.

A copy does no arithmetic, so the floor is (bytes read + bytes written) / memory bandwidth, and two
things decide how near it a kernel comes: every access 16 bytes wide and neighbouring, and enough of
them in flight. The first is why addresses are built as a vector of 16-byte units with two 8-byte
words innermost, which the compiler joins into one access; the second is why a tile has several
units per thread, all loaded before the first is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .table import BYTE_UNITS, CopyTable

WARPS = 4


@triton.jit
def _copy_tiles(
    desc_B8,  # in, int64 (blocks, 8): see table.py
    tile_T,  # in, int32 (tiles,): block of every tile
    LANES: tl.constexpr,  # units of one tile
    BYTES: tl.constexpr,  # width codes from here on mean one-byte units
):
    tile = tl.program_id(0)
    desc = desc_B8 + tl.load(tile_T + tile).to(tl.int64) * 8
    src = tl.load(desc)
    dst = tl.load(desc + 1)
    rows = tl.load(desc + 2).to(tl.int32)
    units = tl.load(desc + 3).to(tl.int32)
    src_stride = tl.load(desc + 4)
    dst_stride = tl.load(desc + 5)
    local = tile - tl.load(desc + 6).to(tl.int32)
    code = tl.load(desc + 7).to(tl.int32)
    log2 = code % BYTES
    across = (units + (1 << log2) - 1) >> log2
    lane = tl.arange(0, LANES)
    row = (local // across) * (LANES >> log2) + (lane >> log2)
    col = ((local % across) << log2) + (lane & ((1 << log2) - 1))
    inside = (row < rows) & (col < units)
    row = row.to(tl.int64)
    col = col.to(tl.int64)
    if code < BYTES:
        half = tl.arange(0, 2)[None, :]
        src_L = (src + row * src_stride + col * 16).to(tl.pointer_type(tl.int64))
        dst_L = (dst + row * dst_stride + col * 16).to(tl.pointer_type(tl.int64))
        src_L2 = tl.max_contiguous(tl.multiple_of(src_L[:, None] + half, (16, 16)), (1, 2))
        dst_L2 = tl.max_contiguous(tl.multiple_of(dst_L[:, None] + half, (16, 16)), (1, 2))
        words = tl.load(src_L2, mask=inside[:, None], eviction_policy="evict_first")
        tl.store(dst_L2, words, mask=inside[:, None])
    else:
        byte_src_L = (src + row * src_stride + col).to(tl.pointer_type(tl.uint8))
        byte_dst_L = (dst + row * dst_stride + col).to(tl.pointer_type(tl.uint8))
        tl.store(byte_dst_L, tl.load(byte_src_L, mask=inside), mask=inside)


def copy_blocks_triton(table: CopyTable, num_warps: int = WARPS) -> None:
    """Run every copy of a table in one launch on its device."""
    desc_B8, tile_T = table.device_table
    _copy_tiles[(tile_T.numel(),)](
        desc_B8, tile_T, LANES=table.lanes, BYTES=BYTE_UNITS, num_warps=num_warps
    )
