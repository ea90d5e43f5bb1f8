"""Small host ↔ device copies that the host does not wait for.

A copy from ordinary host memory makes the host wait for everything that the device has still to
do; one from pinned memory only takes its place in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(
    numbers: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of an array or of (nested lists of) numbers on the device."""
    host = torch.as_tensor(numbers, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class ToHost:
    """A copy to the host that starts when the device has got there."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor

    def wait(self) -> Tensor:
        """The values; waits for this copy, not for what the device was given after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
