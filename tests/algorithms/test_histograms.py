"""Pure: bucket counts equal numpy's, ignore what is masked, and add up."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.histograms import RATIO_LOG2_EDGES, ratio_counts
from megatron_rl.algorithms.metrics import add_metrics, mean_metrics, reduce_metrics


def test_counts_equal_numpy_and_add_up_over_parts():
    log_ratio_N = torch.randn(5000) * torch.rand(5000) * 2
    live_N = torch.rand(5000) < 0.8
    counts = ratio_counts(log_ratio_N, live_N)
    edges = np.concatenate(([-np.inf], RATIO_LOG2_EDGES.numpy(), [np.inf]))
    log2 = log_ratio_N[live_N].double().numpy() / np.log(2)
    expected, _ = np.histogram(log2, edges)
    assert (counts.numpy() - expected).__abs__().sum() <= 2, "an edge may round either way"
    assert counts.sum() == live_N.sum() and counts[0] > 0 and counts[-1] > 0
    parts = [ratio_counts(log_ratio_N[i::3], live_N[i::3]) for i in range(3)]
    assert torch.equal(sum(parts), counts)


def test_histograms_travel_with_the_other_metrics():
    parts = [
        {"ratio_hist": torch.tensor([1.0, 2.0]), "tokens": torch.tensor(3), "x_sum": torch.ones(()),
         "y_max": torch.tensor(float(i))}
        for i in range(2)
    ]  # fmt: skip
    total = reduce_metrics(add_metrics(parts), None)
    assert total["ratio_hist"].tolist() == [2.0, 4.0]
    assert mean_metrics(total) == {"tokens": 6.0, "x": 2 / 6, "y_max": 1.0}
