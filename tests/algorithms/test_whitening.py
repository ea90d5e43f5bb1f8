"""Pure and ranks layers: whitening is over all ranks, and safe where there is no scale."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from megatron_rl.algorithms.whitening import whiten


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, torch.as_tensor(expected), atol=atol, rtol=0)


def test_golden_whitening_skips_the_mask():
    x, mask = tensor([1.0, 2, 3, 4]), tensor([1, 1, 1, 0])
    close(whiten(x, mask), [-1.0, 0.0, 1.0, 0.0])
    close(whiten(x, mask, unbiased=False), [-1.2247448, 0.0, 1.2247448, 0.0])


def test_without_shift_only_the_scale_changes():
    x = tensor([1.0, 2, 3, math.nan])
    close(whiten(x, tensor([1, 1, 1, 0]), shift_mean=False), [1.0, 2.0, 3.0, 0.0])
    close(whiten(x * 10, tensor([1, 1, 1, 0]), shift_mean=False), [19.0, 20.0, 21.0, 0.0])


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e7])
def test_large_offset_does_not_cancel(offset):
    spread = tensor([-2.0, 0.0, 1.0, 3.0])
    got = whiten(spread + offset, torch.ones(4))
    close(got, (spread - spread.mean()) / spread.std(), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8 + 0.1, -3e30])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_constant_or_tiny_batches_become_zeros(value, count):
    x = torch.full((count + 2,), math.nan)
    x[:count] = value
    mask = torch.arange(count + 2) < count
    assert not whiten(x, mask).any()
    kept = whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept[:count], x[:count], rtol=1e-6, atol=0)


def test_nan_is_not_laundered():
    assert whiten(tensor([1.0, math.nan, 2.0]), torch.ones(3)).isnan().all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), width=st.integers(1, 8))
def test_masked_values_and_order_do_not_matter(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    got = whiten(x, mask)
    assert torch.equal(whiten(x.masked_fill(~mask, math.nan), mask), got)
    order = torch.randperm(rows, generator=generator)
    close(whiten(x[order], mask[order]), got[order], atol=1e-5)
    if mask.sum() > 1:
        assert abs(got[mask].mean().item()) < 1e-5
        assert got[mask].std().item() == pytest.approx(1.0, abs=1e-3)


def whiten_part(rank, world_size, parts, masks, shift_mean):
    part = torch.tensor(parts[rank])
    mask = torch.tensor(masks[rank])
    return whiten(part, mask, shift_mean=shift_mean, group=dist.group.WORLD).tolist()


@pytest.mark.ranks
def test_golden_whitening_is_over_all_ranks(ranks):
    first, second = ranks(2, whiten_part, [[1.0, 2, 3], [10.0]], [[1, 1, 1], [1]], True)
    close(tensor(first + second), [-0.7348470, -0.4898980, -0.2449490, 1.4696939])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parts", "masks"),
    [
        ([[7.1, 7.1], [7.1]], [[1, 1], [1]]),  # constant over both
        ([[5.0, 1.0], [2.0]], [[1, 0], [0]]),  # a single element
        ([[5.0, 1.0], [2.0]], [[0, 0], [0]]),  # none
    ],
)
def test_all_ranks_get_zeros_together(ranks, parts, masks):
    for result in ranks(2, whiten_part, parts, masks, True):
        assert not any(result)


@pytest.mark.ranks
def test_constant_on_each_rank_alone_is_still_whitened(ranks):
    first, second = ranks(2, whiten_part, [[1.0], [3.0]], [[1], [1]], True)
    close(tensor(first + second), [-0.7071068, 0.7071068])


@pytest.mark.ranks
def test_nan_on_one_rank_shows_on_all(ranks):
    for result in ranks(2, whiten_part, [[1.0, 2.0], [math.nan]], [[1, 1], [1]], True):
        assert all(math.isnan(value) for value in result)
