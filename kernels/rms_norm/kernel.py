"""Residual-add RMSNorm in Triton: one program normalises one row held in registers.

The row is read once and written once (twice with a residual), the least memory traffic there is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `megatron_rl.kernels.rms_norm.rms_norm`; arguments are checked there."""
    hidden = x.shape[-1]
    x_TH = x.contiguous().view(-1, hidden)
    y_TH = torch.empty(
        x_TH.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device
    )
    added = residual is not None
    residual_TH = residual.contiguous().view(-1, hidden) if added else x_TH
    stream_TH = torch.empty_like(x_TH) if added else x_TH
    block = triton.next_power_of_2(hidden)
    if len(x_TH):
        _rms_norm[(len(x_TH),)](
            x_TH, residual_TH, weight, y_TH, stream_TH, hidden, eps,
            BLOCK=block, ADD=added, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return y_TH.view(x.shape), stream_TH.view(x.shape) if added else x


@triton.jit
def _rms_norm(
    x_ptr,  # [T, hidden] in
    residual_ptr,  # [T, hidden] in, read when ADD
    weight_ptr,  # [hidden] in
    y_ptr,  # [T, hidden] out
    stream_ptr,  # [T, hidden] out, x + residual, written when ADD
    hidden, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    live = at < hidden
    dtype = x_ptr.dtype.element_ty
    row = tl.load(x_ptr + start + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(residual_ptr + start + at, mask=live, other=0.0).to(tl.float32)
        stream = row.to(dtype)
        tl.store(stream_ptr + start + at, stream, mask=live)
        row = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / hidden + eps)
    normed = (row * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + at, (weight * normed).to(y_ptr.dtype.element_ty), mask=live)
