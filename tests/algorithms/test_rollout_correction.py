"""Pure layer: drift between the policy that generated and the policy that trains."""

import math

import pytest
import torch
from torch import tensor

from megatron_rl.algorithms.metrics import mean_metrics
from megatron_rl.algorithms.rollout_correction import (
    drift_metrics,
    sequence_drift_mask,
    truncated_importance_weights,
)


def test_golden_truncated_importance_weight():
    old, rollout = tensor([-1.0, -1.0]), tensor([-1.2, -0.8])
    got = truncated_importance_weights(old, rollout, cap=2.0)
    torch.testing.assert_close(got, tensor([1.2214028, math.exp(-0.2)]))
    assert truncated_importance_weights(old, rollout, cap=1.05)[0].item() == pytest.approx(1.05)
    assert truncated_importance_weights(tensor([500.0]), tensor([0.0]), cap=2.0).item() == 2.0
    with pytest.raises(ValueError, match="cap=0"):
        truncated_importance_weights(old, rollout, cap=0)


def test_drift_is_measured_over_trained_tokens_only():
    rollout = tensor([-1.0, -2.0, -3.0, math.nan])
    delta = tensor([0.1, -0.4, 0.5, 7.0])
    got = drift_metrics(
        rollout + delta, rollout, tensor([1, 1, 1, 0]), clip_low=0.2, clip_high=0.28
    )
    means = mean_metrics(got)
    assert means["tokens"] == 3
    assert means["drift_abs"] == pytest.approx(1 / 3, abs=1e-6)
    assert means["drift_abs_max"] == pytest.approx(0.5, abs=1e-6)
    assert means["drift_outside"] == pytest.approx(2 / 3)
    k3 = (delta[:3].exp() - 1 - delta[:3]).mean().item()
    assert means["drift_kl3"] == pytest.approx(k3, abs=1e-6)


def test_drift_of_an_inert_micro_batch_is_zero():
    nan = torch.full((2, 3), math.nan)
    got = drift_metrics(nan, nan, torch.zeros(2, 3), clip_low=0.2, clip_high=0.2)
    assert all(value.item() == 0 for value in got.values())


def test_sequence_mask_drops_rows_by_their_geometric_mean_ratio():
    delta = tensor(
        [
            [0.1, 0.1, math.nan],  # mean ratio 1.105: kept
            [0.9, -0.9, 0.0],  # tokens far off, mean 1: kept
            [0.5, 0.5, 0.5],  # 1.65: dropped
            [-0.5, -0.5, -0.5],  # 0.61: dropped, from below
            [math.nan, 0.0, 0.0],  # a NaN in a trained token: dropped
            [math.nan, math.nan, math.nan],  # nothing trained
        ]
    )
    mask = tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    got = sequence_drift_mask(delta, torch.zeros_like(delta), mask, threshold=1.5)
    assert got.any(dim=1).tolist() == [True, True, False, False, False, False]
    assert torch.equal(got[:2], mask[:2]) and got.dtype == mask.dtype
    with pytest.raises(ValueError, match="threshold=1"):
        sequence_drift_mask(delta, delta, mask, threshold=1)
