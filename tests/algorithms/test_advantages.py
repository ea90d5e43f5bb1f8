"""Pure layer: advantage estimators against golden numbers and a serial float64 reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from megatron_rl.algorithms.advantages import (
    broadcast_to_tokens,
    discounted_suffix_sums,
    gae,
    group_advantages,
    length_adaptive_lambda,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)

SEEDS = st.integers(0, 2**31)


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, torch.as_tensor(expected), atol=atol, rtol=0)


def serial_gae(rewards, values, gamma, lam, bootstrap):
    """One row without masked tokens, the textbook loop on Python floats."""
    advantages, running, next_value = [], 0.0, bootstrap
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * next_value - value + gamma * lam * running
        next_value = value
        advantages.append(running)
    return advantages[::-1]


def ragged_batch(seed, rows, width, inner_holes=True):
    """Random rewards and values with NaN wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    length = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < length
    if inner_holes:
        mask &= torch.rand(rows, width, generator=generator) < 0.7
    return (
        rewards.masked_fill(~mask, math.nan),
        values.masked_fill(~mask, math.nan),
        mask.long(),
        torch.randn(rows, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("gamma", "advantages", "returns"),
    [
        (1.0, [0.46575, 0.385, 0.3], [0.96575, 0.985, 1.0]),
        (0.99, [0.4468286, 0.37515, 0.3], [0.9468286, 0.97515, 1.0]),
    ],
)
def test_golden_gae(gamma, advantages, returns):
    got = gae(
        tensor([[0.0, 0, 1]]), tensor([[0.5, 0.6, 0.7]]), torch.ones(1, 3), gamma=gamma, lam=0.95
    )
    close(got[0], [advantages])
    close(got[1], [returns])


def test_golden_gae_without_lambda_looks_one_step_ahead():
    got = gae(
        tensor([[0.0, 0, 1, 0]]), tensor([[0.0, 1, 2, 3]]), torch.ones(1, 4), gamma=0.5, lam=0.0
    )
    close(got[0], [[0.5, 0.0, 0.5, -3.0]])
    close(got[1], [[0.5, 1.0, 2.5, 0.0]])


def test_golden_value_behind_the_mask_does_not_leak():
    got = gae(
        tensor([[0.0, 1, 0]]),
        tensor([[0.0, 0, 100]]),
        tensor([[1, 1, 0]]),
        gamma=1.0,
        lam=0.95,
    )
    close(got[0], [[0.95, 1.0, 0.0]])
    close(got[1], [[0.95, 1.0, 0.0]])


def test_truncated_response_bootstraps_and_finished_one_does_not():
    rewards, values = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = tensor([[1, 1, 0], [1, 1, 1]])
    got, _ = gae(rewards, values, mask, gamma=0.5, lam=1.0, bootstrap_B=tensor([4.0, 0.0]))
    close(got, [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, rows=st.integers(0, 4), width=st.integers(1, 12), per_row=st.booleans())
def test_gae_equals_the_serial_loop_on_the_compressed_row(seed, rows, width, per_row):
    rewards, values, mask, bootstrap = ragged_batch(seed, rows, width)
    lam = torch.linspace(0.0, 1.0, rows, dtype=torch.float64) if per_row else 0.9
    advantages, returns = gae(rewards, values, mask, gamma=0.97, lam=lam, bootstrap_B=bootstrap)
    for row in range(rows):
        live = mask[row].bool()
        row_lam = float(lam[row]) if per_row else lam
        expected = serial_gae(
            rewards[row, live].tolist(),
            values[row, live].tolist(),
            0.97,
            row_lam,
            bootstrap[row].item(),
        )
        expected = tensor(expected, dtype=torch.float64)
        close(advantages[row, live], expected, atol=1e-12)
        close(returns[row, live], expected + values[row, live], atol=1e-12)
        assert not advantages[row, ~live].any() and not returns[row, ~live].any()


@pytest.mark.parametrize("width", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("lam", [0.95, 1.0])
def test_chunked_and_serial_gae_agree_at_chunk_edges(width, lam):
    rewards, values = torch.randn(2, 2, width)
    advantages, _ = gae(rewards, values, torch.ones(2, width), gamma=1.0, lam=lam)
    for row in range(2):
        expected = serial_gae(rewards[row].tolist(), values[row].tolist(), 1.0, lam, 0.0)
        close(advantages[row], expected, atol=2e-4 if lam == 1.0 else 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    width=st.integers(1, 30),
    chunk=st.integers(1, 9),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_suffix_sums_do_not_depend_on_the_chunk(seed, width, chunk, discount):
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = discounted_suffix_sums(x, discount, chunk)
    expected = x.clone()
    for t in reversed(range(width - 1)):
        expected[:, t] += discount * expected[:, t + 1]
    close(got, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("std", "eps", "size"),
    [("sample", 1e-6, 0.8660239), ("population", 1e-4, 0.9998), ("none", 1e-6, 0.5)],
)
def test_golden_group_advantages(std, eps, size):
    got = group_advantages(tensor([1.0, 0, 0, 1]), torch.zeros(4).long(), std=std, eps=eps)
    close(got, [size, -size, -size, size], atol=1e-6)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("score", [1.0, 0.35, 1e6 + 0.1])
def test_group_of_equal_scores_has_exactly_no_advantage(std, score):
    for n in (1, 4, 7):
        got = group_advantages(torch.full((n,), score), torch.zeros(n).long(), std=std)
        assert not got.any()


@pytest.mark.parametrize("std", ["sample", "population"])
def test_golden_one_odd_score_in_eight_gives_an_advantage_of_a_few(std):
    got = group_advantages(tensor([0.35] * 7 + [0.0]), torch.zeros(8).long(), std=std)
    assert got.abs().max() < 3 and got[7] < -2
    assert rloo(tensor([0.35] * 7 + [0.0]), torch.zeros(8).long())[7].item() == pytest.approx(-0.35)


def test_golden_rloo():
    got = rloo(tensor([1.0, 2, 3, 6]), torch.zeros(4).long())
    close(got, [-2.6666667, -1.3333333, 0.0, 4.0], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, groups=st.integers(1, 4), n=st.integers(2, 5))
def test_group_estimators_follow_a_permutation_of_samples(seed, groups, n):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * n, generator=generator)
    ids = torch.arange(groups).repeat_interleave(n) * 7 - 3
    order = torch.randperm(groups * n, generator=generator)
    estimators = (
        rloo,
        lambda s, g: group_advantages(s, g, std="sample"),
        lambda s, g: group_advantages(s, g, std="none"),
    )
    for estimate in estimators:
        plain = estimate(scores, ids)
        close(estimate(scores[order], ids[order]), plain[order], atol=1e-6)
        for group in ids.unique():  # groups don't see each other
            alone = estimate(scores[ids == group], ids[ids == group])
            close(plain[ids == group], alone, atol=1e-6)


def test_golden_reinforce_plus_plus():
    rewards = tensor([[0.0, 0, 1], [0, 1, math.nan]])
    advantages, returns = reinforce_plus_plus(rewards, tensor([[1, 1, 1], [1, 1, 0]]), 0.9)
    close(returns, [[0.81, 0.9, 1.0], [0.9, 1.0, 0.0]])
    expected = [[-1.3978176, -0.2745720, 0.9734786], [-0.2745720, 0.9734786, 0.0]]
    close(advantages, expected)


def test_reinforce_plus_plus_skips_tool_tokens():
    holes = tensor([[0.0, math.nan, 0, math.nan, 1]])
    _, returns = reinforce_plus_plus(holes, tensor([[1, 0, 1, 0, 1]]), 0.9)
    close(returns, [[0.81, 0.0, 0.9, 0.0, 1.0]])


def test_reinforce_plus_plus_baseline_centres_by_group_and_whitens_over_tokens():
    scores, ids = tensor([1.0, 0.0, 5.0, 2.0]), tensor([0, 0, 1, 1])
    mask = tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]])
    got = reinforce_plus_plus_baseline(scores, ids, mask)
    tokens = tensor([0.5, 0.5, -0.5, 1.5, 1.5, 1.5, -1.5])
    close(got[mask.bool()], (tokens - tokens.mean()) / tokens.std())
    assert not got[mask == 0].any()


def test_broadcast_gives_each_trained_token_its_sequence_advantage():
    got = broadcast_to_tokens(tensor([2.0, math.nan]), tensor([[1, 0, 1], [0, 0, 0]]))
    assert got.tolist() == [[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_length_adaptive_lambda_grows_with_the_response():
    got = length_adaptive_lambda(tensor([0, 10, 20, 40, 2000]), alpha=0.05)
    close(got, [0.0, 0.0, 0.0, 0.5, 0.99])
    with pytest.raises(ValueError, match="alpha above 0"):
        length_adaptive_lambda(tensor([1]), alpha=0.0)


def test_bad_input_is_refused():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"\[B, R\]"):
        gae(two, three, three, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="rollout.n"):
        rloo(torch.zeros(3), tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="group ids"):
        rloo(torch.zeros(3), tensor([0, 0]))
    with pytest.raises(ValueError, match="sample, population or none"):
        group_advantages(torch.zeros(2), tensor([0, 0]), std="unbiased")


@given(seed=st.integers(0, 2**16), groups=st.integers(1, 4), n=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_no_estimator_sees_order_padding_or_what_is_masked(seed, groups, n):
    """Samples in another order, wider padding, and garbage behind the mask: the same advantages."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = groups * n, 7
    rewards, values = torch.randn(2, rows, width, generator=generator)
    mask = (torch.rand(rows, width, generator=generator) < 0.7).float()
    mask[:, 0] = 1.0
    scores = torch.randn(rows, generator=generator)
    group = torch.arange(groups).repeat_interleave(n)

    def everything(order, extra, garbage):
        def widen(x):
            x = torch.where(mask[order].bool(), x[order], garbage)
            return torch.nn.functional.pad(x, (0, extra), value=garbage)

        live = torch.nn.functional.pad(mask[order], (0, extra))
        r, v, s, g = widen(rewards), widen(values), scores[order], group[order]
        return [
            x[:, :width]
            for x in (
                *gae(r, v, live, gamma=0.9, lam=0.8),
                *reinforce_plus_plus(r, live, 0.9),
                reinforce_plus_plus_baseline(s, g, live),
                broadcast_to_tokens(group_advantages(s, g, std="sample"), live),
                broadcast_to_tokens(rloo(s, g), live),
            )
        ]

    plain = everything(torch.arange(rows), 0, 0.0)
    order = torch.randperm(rows, generator=generator)
    for got, want in zip(everything(order, 3, float("nan")), plain, strict=True):
        torch.testing.assert_close(got, want[order], atol=2e-5, rtol=2e-5)
