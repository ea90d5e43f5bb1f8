"""Tail sums of logits in Triton, the inner pass of the top-k/top-p search (`threshold.py`).

A program takes a chunk of one row and sums the weights above sixteen pivots; integer partial sums
are then added by torch, in any order, with the same result.

Shapes: T rows, V columns of the shard, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
DIGITS = 16
MASS_SCALE = tl.constexpr(float(1 << 38))


def tail_sums(
    logits_TV: Tensor, tau_T: Tensor, top_T: Tensor, key_T: Tensor, shift: int, weighted: bool
) -> Tensor:
    """Σ of weights with key ≥ key_T + (d << shift) for d in 0..15, int64 `[T, 16]`.

    Args:
        logits_TV: `[T, V]`, every column a real token.
        tau_T, top_T: fp32 `[T]`, temperature and the row's largest logit over all shards.
        key_T: int64 `[T]`, the search's prefix.
        weighted: fixed-point exp((x − top) / τ) rather than 1.
    """
    rows, columns = logits_TV.shape
    chunks = triton.cdiv(columns, CHUNK)
    sums_T16C = torch.zeros((rows, DIGITS, chunks), dtype=torch.int64, device=logits_TV.device)
    if rows and chunks:
        _tail_sums[(chunks, rows)](
            logits_TV, tau_T, top_T, key_T, sums_T16C, logits_TV.stride(0), columns, chunks, shift,
            CHUNK=CHUNK, WEIGHTED=weighted, num_warps=4,
        )  # fmt: skip
    return sums_T16C.sum(-1)


@triton.jit
def _tail_sums(
    logits_ptr,  # [T, V] in
    tau_ptr,  # [T] fp32 in
    top_ptr,  # [T] fp32 in
    key_ptr,  # [T] int64 in
    sum_ptr,  # [T, 16, C] int64 out
    logits_t, columns, chunks, shift,
    CHUNK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    live = column < columns
    logit = tl.load(logits_ptr + row * logits_t + column, mask=live, other=0.0).to(tl.float32)
    bits = (logit + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    key = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    if WEIGHTED:
        tau = tl.load(tau_ptr + row)
        weight = tl.exp(logit / tau - tl.load(top_ptr + row) / tau) * MASS_SCALE
        weight = tl.where(live, weight.to(tl.int64), 0)
    else:
        weight = live.to(tl.int64)
    prefix = tl.load(key_ptr + row)
    out = sum_ptr + row * (16 * chunks) + chunk
    for digit in tl.static_range(16):
        pivot = prefix + (tl.full([], digit, tl.int64) << shift)
        tl.store(out + digit * chunks, tl.sum(tl.where(key >= pivot, weight, 0), 0))
