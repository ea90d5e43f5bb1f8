"""Rotary embedding fused with the paged KV write, in Triton.

One program takes one token and one KV head: the query heads that share it, its key and its value.
That is the order in which Megatron lays out a fused QKV output, so its reads are one run of
memory. Queries and key are rotated in registers; the key goes both to the caller (a prefill
attends to it) and to the cache, the value to the cache.

Shapes: T tokens, H query heads, G KV heads, Q = H / G, D head dimension, R rotary width,
S block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rope_kv_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `megatron_rl.kernels.rope_kv_write.rope_kv_write`; arguments are checked there."""
    tokens, groups, dim = k_TGD.shape
    width = cos_sin_PR.shape[1]
    q_TGQD = q_THD if q_THD.ndim == 4 else q_THD.unflatten(1, (groups, -1))
    repeat = q_TGQD.shape[2]
    heads = groups * repeat
    q_out = torch.empty((tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty((tokens, groups, dim), dtype=k_TGD.dtype, device=k_TGD.device)
    if tokens == 0:
        return q_out, k_out
    _rope_kv_write[(groups, tokens)](
        q_TGQD, k_TGD, v_TGD, cos_sin_PR, positions_T, slots_T, q_out, k_out, k_cache, v_cache,
        *q_TGQD.stride()[:3], *k_TGD.stride()[:2], *v_TGD.stride()[:2], cos_sin_PR.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], groups,
        Q=repeat, Q_PAD=triton.next_power_of_2(repeat), D=dim, D_PAD=triton.next_power_of_2(dim),
        HALF=width // 2, HALF_PAD=triton.next_power_of_2(width // 2), S=k_cache.shape[1],
        num_warps=1,
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def _rope_kv_write(
    q_ptr,  # [T, G, Q, D] in
    k_ptr,  # [T, G, D] in
    v_ptr,  # [T, G, D] in
    table_ptr,  # [P, R] fp32 in
    position_ptr,  # [T] int64 in
    slot_ptr,  # [T] int64 in
    q_out_ptr,  # [T, H, D] out
    k_out_ptr,  # [T, G, D] out
    k_cache_ptr,  # [blocks, S, G, D] out
    v_cache_ptr,  # [blocks, S, G, D] out
    q_t, q_g, q_q, k_t, k_h, v_t, v_h, table_p, kc_n, kc_s, kc_g, vc_n, vc_s, vc_g, groups,
    Q: tl.constexpr, Q_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, HALF_PAD)
    half_live = half < HALF
    table_at = table_ptr + tl.load(position_ptr + token) * table_p + half
    cos = tl.load(table_at, mask=half_live, other=0.0)
    sin = tl.load(table_at + HALF, mask=half_live, other=0.0)

    query = tl.arange(0, Q_PAD)
    head = (group * Q + query)[:, None]
    q_live = (query < Q)[:, None] & half_live[None, :]
    q_row = q_ptr + token * q_t + group * q_g + query[:, None] * q_q
    q_at = q_row + half[None, :]
    q1 = tl.load(q_at, mask=q_live, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + HALF, mask=q_live, other=0.0).to(tl.float32)
    q_out_at = q_out_ptr + (token * groups * Q + head) * D + half[None, :]
    dtype = q_out_ptr.dtype.element_ty
    tl.store(q_out_at, (q1 * cos[None, :] - q2 * sin[None, :]).to(dtype), mask=q_live)
    tl.store(q_out_at + HALF, (q2 * cos[None, :] + q1 * sin[None, :]).to(dtype), mask=q_live)

    k_in = k_ptr + token * k_t + group * k_h
    k_out = k_out_ptr + (token * groups + group) * D
    k1 = tl.load(k_in + half, mask=half_live, other=0.0).to(tl.float32)
    k2 = tl.load(k_in + HALF + half, mask=half_live, other=0.0).to(tl.float32)
    # Rounded to the key's dtype first: the cache must hold the very key a prefill attends to.
    y1 = (k1 * cos - k2 * sin).to(dtype)
    y2 = (k2 * cos + k1 * sin).to(dtype)
    tl.store(k_out + half, y1, mask=half_live)
    tl.store(k_out + HALF + half, y2, mask=half_live)

    d = tl.arange(0, D_PAD)
    rest = (d >= 2 * HALF) & (d < D)
    if 2 * HALF < D:
        k_pass = tl.load(k_in + d, mask=rest, other=0.0)
        q_rest = (query < Q)[:, None] & rest[None, :]
        q_pass = tl.load(q_row + d[None, :], mask=q_rest, other=0.0)
        tl.store(q_out_ptr + (token * groups * Q + head) * D + d[None, :], q_pass, mask=q_rest)
        tl.store(k_out + d, k_pass, mask=rest)

    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        block, offset = slot // S, slot % S
        k_cache = k_cache_ptr + block * kc_n + offset * kc_s + group * kc_g
        v_cache = v_cache_ptr + block * vc_n + offset * vc_s + group * vc_g
        cache_dtype = k_cache_ptr.dtype.element_ty
        tl.store(k_cache + half, y1.to(cache_dtype), mask=half_live)
        tl.store(k_cache + HALF + half, y2.to(cache_dtype), mask=half_live)
        if 2 * HALF < D:
            tl.store(k_cache + d, k_pass.to(cache_dtype), mask=rest)
        v = tl.load(v_ptr + token * v_t + group * v_h + d, mask=d < D, other=0.0)
        tl.store(v_cache + d, v.to(cache_dtype), mask=d < D)
