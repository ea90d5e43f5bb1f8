"""Rotary embedding and paged KV write in plain torch: the test's yardstick, and the CPU path."""

from __future__ import annotations

import torch
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
    """See `megatron_rl.kernels.rope_kv_write.rope_kv_write`."""
    cos_T1R, sin_T1R = cos_sin_PR[positions_T][:, None].chunk(2, dim=-1)
    q_THD = q_THD.flatten(1, -2)
    q_out, k_out = rotate(q_THD, cos_T1R, sin_T1R), rotate(k_TGD, cos_T1R, sin_T1R)
    stored = (slots_T >= 0).nonzero().squeeze(1)
    block, offset = slots_T[stored] // k_cache.shape[1], slots_T[stored] % k_cache.shape[1]
    k_cache[block, offset] = k_out[stored].to(k_cache.dtype)
    v_cache[block, offset] = v_TGD[stored].to(v_cache.dtype)
    return q_out, k_out


def rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Half-split rotation in fp32 of the first 2·R' dimensions, R' the width of cos and sin."""
    half = cos_T1R.shape[-1]
    first, second, rest = x_THD.float().split((half, half, x_THD.shape[-1] - 2 * half), dim=-1)
    turned = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R, rest)
    return torch.cat(turned, dim=-1).to(x_THD.dtype)
