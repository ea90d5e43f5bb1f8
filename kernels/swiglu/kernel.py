"""SwiGLU in Triton: each program takes a stretch of one row, read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """See `megatron_rl.kernels.swiglu.swiglu`; arguments are checked there."""
    width = gate_up.shape[-1] // 2
    source_TF = gate_up.contiguous().view(-1, 2 * width)
    out_TF = torch.empty((len(source_TF), width), dtype=gate_up.dtype, device=gate_up.device)
    if out_TF.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _swiglu[(triton.cdiv(width, block), len(source_TF))](
            source_TF, out_TF, width, BLOCK=block, num_warps=max(1, block // 256)
        )
    return out_TF.view(*gate_up.shape[:-1], width)


@triton.jit
def _swiglu(
    source_ptr,  # [T, 2F] in
    out_ptr,  # [T, F] out
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    gate_at = source_ptr + row * 2 * width + at
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=live, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up).to(dtype), mask=live)
