"""The linear layer of a few rows in plain torch: the test's yardstick, and the CPU path."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..rms_norm import reference as rms_norm
from ..swiglu import reference as swiglu


def thin_linear(
    x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, norm, gated: bool
) -> tuple[Tensor, Tensor]:
    """See `megatron_rl.kernels.thin_linear.thin_linear`."""
    hidden_BK, stream_BK = x_BK, x_BK
    if norm is not None:
        hidden_BK, stream_BK = rms_norm.rms_norm(x_BK, norm.weight_K, norm.eps, norm.residual_BK)
    y_BN = F.linear(hidden_BK, weight_NK, bias_N)
    return swiglu.swiglu(y_BN) if gated else y_BN, stream_BK
