"""Histograms whose bucket counts add up over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

# Probability ratios from 1/4 to 4 in 64 steps of equal factor; one bucket more on either side.
RATIO_LOG2_EDGES = torch.linspace(-2.0, 2.0, 65)


def ratio_counts(log_ratio_N: Tensor, live_N: Tensor) -> Tensor:
    """Counts tokens by their probability ratio new / old.

    Comparing with every edge needs neither a sort nor a synchronisation with the device, and adds
    whole numbers: the counts are exact in any order.

    Args:
        log_ratio_N: natural logarithm of the ratio.
        live_N: bool, which tokens count.

    Returns:
        float64 `[len(RATIO_LOG2_EDGES) + 1]`: below the first edge, between edges, above the last.
    """
    edges = RATIO_LOG2_EDGES.to(log_ratio_N) * torch.log(torch.tensor(2.0)).item()
    above = ((log_ratio_N[:, None] >= edges) & live_N[:, None]).sum(0).double()
    tokens = live_N.sum().double()[None]
    return torch.cat((tokens - above[:1], above[:-1] - above[1:], above[-1:]))
