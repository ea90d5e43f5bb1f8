"""Masked whitening over a data-parallel batch, with a two-pass variance.

Shape suffixes: B sequences, R response positions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def whiten(
    x_BR: Tensor,
    mask_BR: Tensor,
    *,
    unbiased: bool = True,
    shift_mean: bool = True,
    eps: float = 1e-8,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the unmasked elements of the batch on all ranks.

    Args:
        x_BR: any shape; values where the mask is 0 are ignored, and 0 in the result.
        unbiased: variance over n - 1 elements instead of n.
        shift_mean: False gives back the mean afterwards: only the scale changes.
        group: ranks that hold parts of the batch, each of which must call this, however few of its
            elements are unmasked. None: this rank's batch alone.

    A constant batch, and one of fewer than two elements, becomes zeros (its mean, without
    shift_mean) on all ranks alike. NaN in an unmasked element makes every element NaN, everywhere.

    The mean is subtracted before squaring, in float64: E[x²] - E[x]² loses everything when the
    offset is large against the spread. float64 also adds up to 2**29 equal fp32 numbers without
    rounding, so a constant batch leaves exact zeros and no residue for the division to blow up.
    """
    live_BR = mask_BR.bool()
    exact_BR = torch.where(live_BR, x_BR, 0.0).double()
    total = torch.stack([exact_BR.sum(), live_BR.sum().double()])
    _sum_over(total, group)
    count = total[1]
    mean = total[0] / count.clamp_min(1.0)
    centred_BR = torch.where(live_BR, exact_BR - mean, 0.0)
    square_sum = centred_BR.square().sum()
    _sum_over(square_sum, group)
    variance = square_sum / (count - 1.0 if unbiased else count).clamp_min(1.0)
    whitened_BR = centred_BR * torch.rsqrt(variance + eps)
    if not shift_mean:
        whitened_BR = torch.where(live_BR, whitened_BR + mean, 0.0)
    return whitened_BR.to(x_BR.dtype)


def _sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
