"""Pure and ranks layers: metric sums over micro-batches and ranks become the right means."""

import pytest
import torch
import torch.distributed as dist
from torch import tensor

from megatron_rl.algorithms.metrics import add_metrics, mean_metrics, reduce_metrics


def test_sums_add_and_maxima_take_the_larger():
    parts = [
        {"tokens": tensor(3), "x_sum": tensor(6.0), "x_max": tensor(5.0), "loss": tensor(0.5)},
        {"tokens": tensor(1), "x_sum": tensor(2.0), "x_max": tensor(2.0), "loss": tensor(0.25)},
    ]
    assert mean_metrics(add_metrics(parts)) == {"tokens": 4, "x": 2.0, "x_max": 5.0, "loss": 0.75}


def test_no_tokens_mean_zero_not_nan():
    assert mean_metrics({"tokens": tensor(0), "x_sum": tensor(0.0)}) == {"tokens": 0, "x": 0.0}


def test_different_keys_are_refused():
    with pytest.raises(ValueError, match="different metrics"):
        add_metrics([{"a": tensor(1)}, {"b": tensor(1)}])


def reduced(rank, world_size):
    metrics = {
        "tokens": tensor(rank + 1),
        "x_sum": tensor(10.0 * rank),
        "x_max": tensor(-float(rank) - 1),
    }
    group = dist.group.WORLD
    return {key: value.item() for key, value in reduce_metrics(metrics, group).items()}


@pytest.mark.ranks
def test_every_rank_gets_the_sums_and_maxima(ranks):
    for result in ranks(4, reduced):
        assert result == {"tokens": 10, "x_sum": 60.0, "x_max": -1.0}


def test_without_a_group_nothing_changes():
    metrics = {"tokens": tensor(2), "x_sum": tensor(3.0)}
    got = reduce_metrics(metrics, None)
    assert {key: value.item() for key, value in got.items()} == {"tokens": 2, "x_sum": 3.0}
    assert all(value.dtype == torch.float64 for value in got.values())
