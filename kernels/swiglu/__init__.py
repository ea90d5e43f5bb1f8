"""SwiGLU of a fused projection (Shazeer 2020): y = silu(gate) · up with [gate, up] side by side.

silu is rounded to the input's dtype before the product, as a trained layer's two operations round.

Shapes: T tokens, F width of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import use_triton
from . import reference

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor, *, backend: str = "auto") -> Tensor:
    """SwiGLU activation.

    Args:
        gate_up: `[..., 2·F]` bf16, fp16 or fp32: F gates, then the F factors.
        backend: `auto`, `triton` or `torch`. Where autograd records the call, torch runs: the
            Triton version has no backward.

    Returns:
        `[..., F]` in the input's dtype.

    Raises:
        ValueError: an odd last dimension.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu wants gates and as many factors, got width {gate_up.shape[-1]}")
    recorded = torch.is_grad_enabled() and gate_up.requires_grad
    if not recorded and use_triton("swiglu", gate_up, backend):
        from . import kernel as path
    else:
        path = reference
    return path.swiglu(gate_up)
