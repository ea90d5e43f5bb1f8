"""Residual-add RMSNorm in plain torch: the test's yardstick, the CPU and the training path."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `megatron_rl.kernels.rms_norm.rms_norm`."""
    stream = x if residual is None else x + residual
    wide = stream.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), stream
