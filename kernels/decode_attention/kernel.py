"""Paged decode attention in Triton: split over the KV cache, then merged.

One program takes one KV head of one sequence over `split_size` tokens, and all R query heads that
share the KV head, so each key and value is read from memory once. It keeps the running maximum m,
the sum l and the accumulator of online softmax (Milakov & Gimelshein 2018; FlashAttention) in
fp32. Where a row needs more than one split, (m, l, acc) go to memory and a second kernel merges
them in order (flash decoding).

The split is a number of tokens, not of programs, so where a row is cut depends on its own length
alone: a row's bits do not change with the batch. Programs past a row's length leave at once, so
the grid depends on the table's width only and a captured graph stays right as sequences grow.
With a window the splits begin at the first token that is seen: nothing before it is read, and no
more programs are launched than a window holds.

Shapes: B sequences, H query heads, G KV heads, R = H / G, D head dimension, N table columns,
S block size, P = number of splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
# Splits merged at once. Wider tiles help one row of a hundred thousand tokens (-12 % at 64) and
# cost many rows of a few splits more (+13 %).
MERGE_TILE = tl.constexpr(16)


# Bytes of keys one step of the walk loads: with two stages in flight, 64 KiB of shared memory.
STEP_BYTES = 16384
DEFAULT_SPLIT = 512


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the walk over the KV cache is laid out on the device.

    Attributes:
        split: tokens a program walks.
        tile: tokens per step of the walk (at least 16, the matrix unit's smallest side).
        warps, stages: Triton's warps per program and software pipelining depth.
    """

    split: int
    tile: int
    warps: int = 4
    stages: int = 2


def default_schedule(head_dim: int, itemsize: int, split_size: int | None) -> Schedule:
    """The schedule measured best on an H200 for this head dimension and element size."""
    fitting = STEP_BYTES // (triton.next_power_of_2(head_dim) * itemsize)
    tile = max(16, min(128, fitting))
    split = DEFAULT_SPLIT if split_size is None else max(split_size, tile)
    return Schedule(split=-(-split // tile) * tile, tile=tile)


def decode_attention(
    q_BGRD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    context_len_B: Tensor,
    scale: float,
    *,
    new=None,
    window: int | None = None,
    split_size: int | None = None,
    schedule: Schedule | None = None,
) -> Tensor:
    """See `megatron_rl.kernels.decode_attention.decode_attention`; arguments are checked there."""
    batch, groups, repeat, dim = q_BGRD.shape
    block_size, heads = k_cache.shape[1], groups * repeat
    plan = schedule or default_schedule(dim, q_BGRD.element_size(), split_size)
    capacity = block_table_BN.shape[1] * block_size
    splits = max(1, triton.cdiv(min(capacity, window or capacity), plan.split))
    out_BHD = torch.empty((batch, heads, dim), dtype=q_BGRD.dtype, device=q_BGRD.device)
    if batch == 0:
        return out_BHD
    # With one split the partials are never touched: the output stands in for them.
    acc_BHPD, ml_2BHP = out_BHD, out_BHD
    if splits > 1:
        acc_BHPD = out_BHD.new_empty((batch, heads, splits, dim), dtype=torch.float32)
        ml_2BHP = out_BHD.new_empty((2, batch, heads, splits), dtype=torch.float32)
    dim_pad = triton.next_power_of_2(dim)
    k_new, v_new, angles = (new.k_BGD, new.v_BGD, new.cos_sin_PR) if new else (out_BHD,) * 3
    _walk[(groups, splits, batch)](
        q_BGRD, k_cache, v_cache, block_table_BN, context_len_B, out_BHD, acc_BHPD, ml_2BHP,
        k_new, v_new, angles, scale * LOG2_E, capacity, *q_BGRD.stride()[:3],
        *k_cache.stride()[:3], *v_cache.stride()[:3], *block_table_BN.stride(),
        *k_new.stride()[:2], *v_new.stride()[:2], angles.stride(0), heads, splits,
        batch * heads * splits,
        R=repeat, R_PAD=max(16, triton.next_power_of_2(repeat)), D=dim, D_PAD=dim_pad,
        S=block_size, TILE=plan.tile, SPLIT=plan.split,
        WINDOW=window or 0, NEW=new is not None, HALF=angles.shape[1] // 2 if new else 0,
        # Triton's interpreter keeps bf16 as integers and would multiply the raw bits.
        WIDEN=not q_BGRD.is_cuda and q_BGRD.dtype == torch.bfloat16,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, batch)](
            acc_BHPD, ml_2BHP, context_len_B, out_BHD, capacity, splits, batch * heads * splits,
            D=dim, D_PAD=dim_pad, SPLIT=plan.split, WINDOW=window or 0, num_warps=2,
        )  # fmt: skip
    return out_BHD


@triton.jit
def _walk(
    q_ptr,  # [B, G, R, D] in
    k_ptr,  # [blocks, S, G, D] in, the new token's written when NEW
    v_ptr,  # [blocks, S, G, D] in, the new token's written when NEW
    table_ptr,  # [B, N] int32 in
    context_ptr,  # [B] int32 in
    out_ptr,  # [B, H, D] out, rows that fit one split
    acc_ptr,  # [B, H, P, D] fp32 out, unnormalised, the other rows
    ml_ptr,  # [2, B, H, P] fp32 out, maximum (base 2) and sum, the other rows
    k_new_ptr,  # [B, G, D] in, read when NEW
    v_new_ptr,  # [B, G, D] in, read when NEW
    angle_ptr,  # [P, 2 · HALF] fp32 in, read when NEW
    scale_log2,
    capacity,
    q_b, q_g, q_r, k_n, k_s, k_g, v_n, v_s, v_g, table_b, table_n,
    kn_b, kn_g, vn_b, vn_g, angle_p, heads, splits, l_offset,
    R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr, NEW: tl.constexpr,
    HALF: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.minimum(tl.load(context_ptr + row), capacity)
    seen_from = 0
    if WINDOW:  # else 0, all
        seen_from = tl.maximum(context - WINDOW, 0)
    start = seen_from + split * SPLIT
    # The first split also answers for rows without context, whose output is zeros.
    if (start < context) | (split == 0):
        stop = tl.minimum(start + SPLIT, context)
        k_ptr += group * k_g
        v_ptr += group * v_g
        table_at = table_ptr + row * table_b
        query = tl.arange(0, R_PAD)
        head, head_live = group * R + query, query < R
        d = tl.arange(0, D_PAD)
        q_at = q_ptr + row * q_b + group * q_g + query[:, None] * q_r
        q_mask = head_live[:, None] & (d < D)[None, :]
        if NEW:
            last = tl.maximum(context - 1, 0)
            angle_at = angle_ptr + last * angle_p
            q = _rotated(q_at, d[None, :], q_mask, angle_at, HALF)
            if (start <= last) & (last < stop):
                _store_new(
                    k_ptr, v_ptr, k_new_ptr + row * kn_b + group * kn_g,
                    v_new_ptr + row * vn_b + group * vn_g, table_at, angle_at, last,
                    k_n, k_s, v_n, v_s, table_n, D, D_PAD, S, HALF,
                )  # fmt: skip
                # This program alone reads them, below: its other threads must see them.
                tl.debug_barrier()
        else:
            q = tl.load(q_at + d[None, :], mask=q_mask, other=0.0)
        m, l, acc = _attend(  # noqa: E741  (the usual name of the softmax sum)
            q, k_ptr, v_ptr, table_at, start, stop, scale_log2, k_n, k_s, v_n, v_s, table_n,
            R_PAD, D, D_PAD, S, TILE, WIDEN,
        )  # fmt: skip
        out_row = row * heads + head
        if context - seen_from <= SPLIT:
            out = acc / tl.where(l > 0.0, l, 1.0)[:, None]
            out_at = out_ptr + out_row[:, None] * D + d[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            part = out_row * splits + split
            tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=q_mask)
            tl.store(ml_ptr + part, m, mask=head_live)
            tl.store(ml_ptr + l_offset + part, l, mask=head_live)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, table_at, start, stop, scale_log2, k_n, k_s, v_n, v_s, table_n,
    R_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax of one KV head's queries over tokens `start` … `stop`: (m, l, acc)."""
    d = tl.arange(0, D_PAD)
    if WIDEN:
        q = q.to(tl.float32)
    m = tl.full([R_PAD], float("-inf"), tl.float32)
    l = tl.zeros([R_PAD], tl.float32)  # noqa: E741
    acc = tl.zeros([R_PAD, D_PAD], tl.float32)
    for token in range(start, stop, TILE):
        n = token + tl.arange(0, TILE)
        live = n < stop
        block = tl.load(table_at + (n // S) * table_n, mask=live, other=0).to(tl.int64)
        # Dead lanes load zeros rather than what the slot holds, which may be NaN.
        mask = live[:, None]
        if D != D_PAD:
            mask = mask & (d < D)[None, :]
        k_at = block * k_n + (n % S) * k_s
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=mask, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        v_at = block * v_n + (n % S) * v_s
        v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None]
        p = p.to(v.dtype)
        if WIDEN:
            p, v = p.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(p, v, acc, input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit
def _store_new(
    k_ptr, v_ptr, k_new_at, v_new_at, table_at, angle_at, last, k_n, k_s, v_n, v_s, table_n,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Writes one KV head of the token at position `last`, its key rotated."""
    d = tl.arange(0, D_PAD)
    live = d < D
    block = tl.load(table_at + (last // S) * table_n).to(tl.int64)
    k_at = k_ptr + block * k_n + (last % S) * k_s + d
    v_at = v_ptr + block * v_n + (last % S) * v_s + d
    tl.store(k_at, _rotated(k_new_at, d, live, angle_at, HALF), mask=live)
    tl.store(v_at, tl.load(v_new_at + d, mask=live), mask=live)


@triton.jit
def _rotated(at, d, mask, angle_at, HALF: tl.constexpr):
    """Head vectors at `at`, rotated in fp32 and rounded once; d past 2 · HALF stays as it is."""
    first = d < HALF
    turns = mask & (d < 2 * HALF)
    pair = tl.where(first, d, d - HALF)
    cos = tl.load(angle_at + pair, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(angle_at + HALF + pair, mask=d < 2 * HALF, other=0.0)
    x = tl.load(at + d, mask=mask, other=0.0)
    partner = tl.load(at + tl.where(first, d + HALF, d - HALF), mask=turns, other=0.0)
    signed = tl.where(first, -sin, sin)
    return (x.to(tl.float32) * cos + partner.to(tl.float32) * signed).to(x.dtype)


@triton.jit
def _merge(
    acc_ptr,  # [B, H, P, D] fp32 in
    ml_ptr,  # [2, B, H, P] fp32 in
    context_ptr,  # [B] int32 in
    out_ptr,  # [B, H, D] out, rows of more than one split
    capacity, splits, l_offset,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(context_ptr + row), capacity)
    if WINDOW:
        seen = tl.minimum(seen, WINDOW)
    written = tl.cdiv(seen, SPLIT)
    if written > 1:
        out_row = row * tl.num_programs(0) + tl.program_id(0)
        d = tl.arange(0, D_PAD)
        m = float("-inf")
        l = 0.0  # noqa: E741
        acc = tl.zeros([D_PAD], tl.float32)
        # Tiles of a fixed number of splits: the order of sums must not follow the table's width.
        for begin in range(0, written, MERGE_TILE):
            part = begin + tl.arange(0, MERGE_TILE)
            live = part < written
            part += out_row * splits
            part_m = tl.load(ml_ptr + part, mask=live, other=float("-inf"))
            part_l = tl.load(ml_ptr + l_offset + part, mask=live, other=0.0)
            part_acc = tl.load(
                acc_ptr + part[:, None] * D + d[None, :],
                mask=live[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(part_m, 0))
            weight = tl.exp2(part_m - m_new)
            shrink = tl.exp2(m - m_new)
            l = l * shrink + tl.sum(part_l * weight, 0)  # noqa: E741
            acc = acc * shrink + tl.sum(part_acc * weight[:, None], 0)
            m = m_new
        out_at = out_ptr + out_row * D + d
        tl.store(out_at, (acc / l).to(out_ptr.dtype.element_ty), mask=d < D)
