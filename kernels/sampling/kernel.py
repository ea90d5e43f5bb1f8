"""Shard sampling in Triton: one pass over the logits, a record per (row, chunk), then a merge.

A row is cut into chunks so that one row already fills the device; each chunk yields the same kind
of record as a shard, so one merge serves chunks and ranks alike. Per logit the pass does one load,
one exponential, two logarithms and two integer hashes: on an H200 that is about as long as the
load itself.

Shapes: T rows, V columns of the shard, C chunks, R records to merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from . import noise

CHUNK = 2048
WARPS = 4
FIELDS = 5
K = tl.constexpr(noise.GOLDEN_32)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)


def shard_records(
    logits_TV: Tensor,
    temperature_T: Tensor,
    stream_T: Tensor,
    position_T: Tensor,
    vocab_size: int,
    vocab_start: int,
    threshold_T: Tensor | None,
) -> Tensor:
    """Records of every chunk of the shard, fp32 `[C, 5, T]` (a view, chunks innermost)."""
    rows, columns = logits_TV.shape
    real = max(0, min(columns, vocab_size - vocab_start))
    chunks = max(1, triton.cdiv(real, CHUNK))
    records_T5C = torch.empty((rows, FIELDS, chunks), dtype=torch.float32, device=logits_TV.device)
    if rows:
        _shard_records[(chunks, rows)](
            logits_TV, temperature_T, stream_T, position_T, threshold_T, records_T5C,
            logits_TV.stride(0), real, vocab_start, chunks,
            CHUNK=CHUNK, CUT=threshold_T is not None, FAST=logits_TV.is_cuda, num_warps=WARPS,
        )  # fmt: skip
    return records_T5C.permute(2, 1, 0)


def merge_records(records_R5T: Tensor) -> Tensor:
    """One record from many, fp32 `[5, T]`."""
    merged_5T = records_R5T.new_empty((FIELDS, records_R5T.shape[2]))
    _launch_merge(records_R5T, merged_5T, None)
    return merged_5T


def choose(records_R5T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token (int64), log-probability and kept log-probability (fp32), each `[T]`."""
    token_T = records_R5T.new_empty(records_R5T.shape[2], dtype=torch.int64)
    logprobs_2T = records_R5T.new_empty((2, records_R5T.shape[2]))
    _launch_merge(records_R5T, logprobs_2T, token_T)
    return token_T, logprobs_2T[0], logprobs_2T[1]


def _launch_merge(records_R5T: Tensor, out_XT: Tensor, token_T: Tensor | None) -> None:
    count, _, rows = records_R5T.shape
    if rows:
        _merge[(rows,)](
            records_R5T, out_XT, token_T, *records_R5T.stride(), count, rows,
            R_PAD=triton.next_power_of_2(count), FINAL=token_T is not None, num_warps=1,
        )  # fmt: skip


@triton.jit
def _mix(h):
    h ^= h >> 16
    h *= MIX_1
    h ^= h >> 15
    h *= MIX_2
    return h ^ (h >> 16)


@triton.jit
def _log(x, FAST: tl.constexpr):
    # The device's own logarithm, absolute error 2^-22; Triton's tl.log is a longer routine, and
    # Triton's interpreter knows that one alone.
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _gumbel(stream, position, ids, FAST: tl.constexpr):
    """Gumbel noise `[CHUNK]` of uint32 token ids; `noise.py` states the formula."""
    a = _mix(stream.to(tl.uint32) ^ _mix(position.to(tl.uint32) + K))
    b = _mix((stream >> 32).to(tl.uint32) ^ _mix(a + K))
    bits = _mix(a + ids * (b | 1))
    # Written out, not 2.0**-32: Triton keeps the literal in fp32.
    w = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    w = tl.minimum(w, 0.99999994)
    # −log(1 − w). Small w decides who wins, and there the logarithm's absolute error would count:
    # the power series Σ w^n / n instead.
    series = tl.full(w.shape, 1.0 / 6, tl.float32)
    for n in tl.static_range(5, 0, -1):
        series = series * w + 1.0 / n
    return -_log(tl.where(w < 0.0625, series * w, -_log(1.0 - w, FAST)), FAST)


@triton.jit
def _log_sum_exp(x, live):
    top = tl.max(tl.where(live, x, float("-inf")), 0)
    anchor = tl.where(top > float("-inf"), top, 0.0)
    return anchor + tl.log(tl.sum(tl.where(live, tl.exp(x - anchor), 0.0), 0))


@triton.jit
def _shard_records(
    logits_ptr,  # [T, V] in
    temperature_ptr,  # [T] fp32 in
    stream_ptr,  # [T] int64 in
    position_ptr,  # [T] int64 in
    threshold_ptr,  # [T] fp32 in, read when CUT
    record_ptr,  # [T, 5, C] fp32 out
    logits_t, real, vocab_start, chunks,
    CHUNK: tl.constexpr, CUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    live = column < real
    logit = tl.load(logits_ptr + row * logits_t + column, mask=live, other=float("-inf"))
    logit = logit.to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    noisy = temperature > 0.0
    inverse_tau = 1.0 / tl.where(noisy, temperature, 1.0)
    scaled = logit * inverse_tau
    top = tl.max(scaled, 0)
    anchor = tl.where(top > float("-inf"), top, 0.0)
    # Dead lanes hold -inf, and exp(-inf) adds nothing.
    mass = tl.exp(scaled - anchor)
    out = record_ptr + row * (5 * chunks) + chunk
    tl.store(out, anchor + tl.log(tl.sum(mass, 0)))
    kept = live
    if CUT:
        # The kept logits are the largest, so the anchor is one of them or there are none.
        kept = live & (logit >= tl.load(threshold_ptr + row))
        mass = tl.where(kept, mass, 0.0)
    tl.store(out + chunks, anchor + tl.log(tl.sum(mass, 0)))
    ids = vocab_start + column
    noise = _gumbel(tl.load(stream_ptr + row), tl.load(position_ptr + row), ids.to(tl.uint32), FAST)
    value = scaled + tl.where(noisy, noise, 0.0)
    value = tl.where(kept & (value == value), value, float("-inf"))
    best, winner = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    found = best > float("-inf")
    winner += chunk * CHUNK
    won = tl.load(logits_ptr + row * logits_t + winner, mask=found, other=0.0)
    won = won.to(tl.float32) * inverse_tau
    tl.store(out + 2 * chunks, best)
    tl.store(out + 3 * chunks, tl.where(found, vocab_start + winner, -1).to(tl.float32))
    tl.store(out + 4 * chunks, tl.where(found, won, float("-inf")))


@triton.jit
def _merge(
    record_ptr,  # [R, 5, T] fp32 in, any strides
    out_ptr,  # FINAL: [2, T] fp32 log-probs out; else [5, T] fp32 record out
    token_ptr,  # [T] int64 out, written when FINAL
    stride_r, stride_f, stride_t, count, rows,
    R_PAD: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, R_PAD)
    live = r < count
    at = record_ptr + row * stride_t + r * stride_r
    part = tl.load(at, mask=live, other=float("-inf"))
    lse = _log_sum_exp(part, live)
    part = tl.load(at + stride_f, mask=live, other=float("-inf"))
    kept_lse = _log_sum_exp(part, live)
    value = tl.load(at + 2 * stride_f, mask=live, other=float("-inf"))
    best = tl.max(value, 0)
    first = tl.min(tl.where(live & (value == best), r, R_PAD), 0)
    winner = record_ptr + row * stride_t + first * stride_r
    token = tl.load(winner + 3 * stride_f)
    scaled = tl.load(winner + 4 * stride_f)
    if FINAL:
        tl.store(token_ptr + row, token.to(tl.int64))
        tl.store(out_ptr + row, scaled - lse)
        tl.store(out_ptr + rows + row, scaled - kept_lse)
    else:
        tl.store(out_ptr + row, lse)
        tl.store(out_ptr + rows + row, kept_lse)
        tl.store(out_ptr + 2 * rows + row, best)
        tl.store(out_ptr + 3 * rows + row, token)
        tl.store(out_ptr + 4 * rows + row, scaled)
