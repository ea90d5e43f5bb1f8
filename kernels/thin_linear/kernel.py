"""The linear layer of a few rows in Triton: each weight is read once, straight into registers.

A program takes a few weight rows whole, asks for them first, and computes the norm of the input
(a few KB from the cache, in every program anew) while they are on their way. There is no loop over
K: what hides the memory's latency is many programs with all their loads in flight.

Shapes: B rows, K inputs, N weight rows, F = N / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many weights a program holds (times 2 where gated), in how many warps."""

    tile: int
    warps: int


DEFAULT = Schedule(tile=8192, warps=4)


def thin_linear(
    x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, norm, gated: bool,
    schedule: Schedule = DEFAULT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `megatron_rl.kernels.thin_linear.thin_linear`; arguments are checked there."""
    (batch, inputs), outputs = x_BK.shape, len(weight_NK) // (2 if gated else 1)
    x_BK = x_BK.contiguous()
    y_BN = torch.empty((batch, outputs), dtype=x_BK.dtype, device=x_BK.device)
    added = norm is not None and norm.residual_BK is not None
    residual_BK = norm.residual_BK.contiguous() if added else x_BK
    stream_BK = torch.empty_like(x_BK) if added else x_BK
    block_k = triton.next_power_of_2(inputs)
    block_n = max(1, schedule.tile // block_k // (2 if gated else 1))
    if batch and outputs:
        _thin_linear[(triton.cdiv(outputs, block_n),)](
            x_BK, residual_BK, norm.weight_K if norm else x_BK, weight_NK,
            bias_N if bias_N is not None else x_BK, y_BN, stream_BK,
            inputs, outputs, weight_NK.stride(0), norm.eps if norm else 0.0,
            B=batch, BLOCK_N=block_n, BLOCK_K=block_k, NORM=norm is not None, ADD=added,
            BIAS=bias_N is not None, GATED=gated,
            num_warps=max(schedule.warps, block_k // 4096),
        )  # fmt: skip
    return y_BN, stream_BK


@triton.jit
def _thin_linear(
    x_ptr,  # [B, K] in
    residual_ptr,  # [B, K] in, read when ADD
    norm_ptr,  # [K] in, read when NORM
    weight_ptr,  # [N, K] in
    bias_ptr,  # [N] in, read when BIAS
    y_ptr,  # [B, N or F] out
    stream_ptr,  # [B, K] out, x + residual, written when ADD
    inputs, outputs, weight_n, eps,
    B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_live, k_live = n < outputs, k < inputs
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * weight_n + k[None, :]
    tile = n_live[:, None] & k_live[None, :]
    weight = tl.load(weight_at, mask=tile, other=0.0)
    if GATED:
        factor_at = weight_ptr + (n.to(tl.int64) + outputs)[:, None] * weight_n + k[None, :]
        factor = tl.load(factor_at, mask=tile, other=0.0)
    dtype = y_ptr.dtype.element_ty
    for b in tl.static_range(B):
        x = tl.load(x_ptr + b * inputs + k, mask=k_live, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(residual_ptr + b * inputs + k, mask=k_live, other=0.0).to(tl.float32)
            stream = x.to(dtype)
            if tl.program_id(0) == 0:
                tl.store(stream_ptr + b * inputs + k, stream, mask=k_live)
            x = stream.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / inputs + eps)
            normed = (x * scale).to(dtype).to(tl.float32)
            x = normed * tl.load(norm_ptr + k, mask=k_live, other=0.0).to(tl.float32)
            x = x.to(dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(factor.to(tl.float32) * x[None, :], 1)
            if BIAS:
                up += tl.load(bias_ptr + outputs + n, mask=n_live, other=0.0).to(tl.float32)
            gate, up = y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        tl.store(y_ptr + b * outputs + n, y.to(dtype), mask=n_live)
