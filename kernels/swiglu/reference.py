"""SwiGLU in plain torch: the test's yardstick, the CPU and the training path."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """See `megatron_rl.kernels.swiglu.swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
