"""Pure layer: losses against golden numbers, and sums that no split of the batch can change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from megatron_rl.algorithms.losses import (
    AGGREGATIONS,
    count_tokens,
    entropy_loss,
    policy_loss,
    token_weights,
    value_loss,
)
from megatron_rl.algorithms.metrics import add_metrics, mean_metrics
from megatron_rl.algorithms.rollout_correction import truncated_importance_weights

GOLDEN_DELTA = tensor([0.5, -0.5, 0.5, 2.0])
GOLDEN_ADVANTAGES = tensor([1.0, 1.0, -1.0, -1.0])
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def golden_policy_loss(weights, dual_clip=3.0):
    return policy_loss(
        GOLDEN_DELTA - 1.0,
        torch.full((4,), -1.0),
        GOLDEN_ADVANTAGES,
        weights,
        **CLIP,
        dual_clip=dual_clip,
    )


def test_golden_policy_loss_and_metrics():
    loss, metrics = golden_policy_loss(torch.full((4,), 0.25))
    assert loss.item() == pytest.approx(0.6905477, abs=1e-6)
    means = mean_metrics(metrics)
    assert means["clipfrac"] == 0.25 and means["dual_clipfrac"] == 0.25
    assert means["approx_kl"] == pytest.approx(-0.625, abs=1e-6)
    assert means["policy_loss"] == pytest.approx(0.6905477, abs=1e-6)
    ratio = GOLDEN_DELTA.exp()
    assert means["ratio"] == pytest.approx(ratio.mean().item(), abs=1e-5)
    assert means["approx_kl3"] == pytest.approx((ratio - 1 - GOLDEN_DELTA).mean().item(), abs=1e-5)


def test_golden_policy_loss_per_token():
    for dual_clip, last in ((3.0, 3.0), (None, 7.3890561)):
        per_token = [
            golden_policy_loss(weights, dual_clip)[0].item() for weights in torch.eye(4).unbind()
        ]
        assert per_token == pytest.approx([-1.28, -0.6065307, 1.6487212, last], abs=1e-6)


def test_clipped_tokens_have_no_gradient_and_others_have_minus_advantage_times_ratio():
    logp = (GOLDEN_DELTA - 1.0).requires_grad_()
    loss, _ = policy_loss(
        logp, torch.full((4,), -1.0), GOLDEN_ADVANTAGES, torch.ones(4), **CLIP, dual_clip=3.0
    )
    loss.backward()
    expected = tensor([0.0, -math.exp(-0.5), math.exp(0.5), 0.0])
    torch.testing.assert_close(logp.grad, expected)


def test_before_any_update_ratio_is_one_and_nothing_is_clipped():
    logp = torch.randn(50) - 3
    advantages = torch.randn(50)
    loss, metrics = policy_loss(logp, logp, advantages, torch.full((50,), 0.02), **CLIP)
    means = mean_metrics(metrics)
    assert means["ratio"] == 1.0 and means["clipfrac"] == 0.0 and means["approx_kl"] == 0.0
    assert loss.item() == pytest.approx(-advantages.mean().item(), abs=1e-6)


def test_absurd_ratio_gives_a_finite_loss_and_gradient():
    logp = tensor([500.0, 500.0, -500.0], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.zeros(3), tensor([1.0, -1, 1]), torch.ones(3), **CLIP)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_golden_value_loss():
    loss, metrics = value_loss(
        tensor([1.0, 2.0]), tensor([0.5, 1.0]), tensor([0.0, 3.0]), torch.full((2,), 0.5), clip=0.2
    )
    assert loss.item() == pytest.approx(1.06, abs=1e-6)
    assert mean_metrics(metrics)["value_clipfrac"] == 0.5
    unclipped, metrics = value_loss(
        tensor([1.0, 2.0]), tensor([0.5, 1.0]), tensor([0.0, 3.0]), torch.full((2,), 0.5), clip=None
    )
    assert unclipped.item() == pytest.approx(0.5, abs=1e-6)
    assert mean_metrics(metrics)["value_clipfrac"] == 0.0


def test_explained_variance_from_sums():
    values, returns = torch.randn(2, 40)
    returns = returns + values
    halves = [
        value_loss(values[part], values[part], returns[part], torch.full((20,), 1 / 40), clip=0.2)
        for part in (slice(0, 20), slice(20, 40))
    ]
    means = mean_metrics(add_metrics(metrics for _, metrics in halves))
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert means["explained_variance"] == pytest.approx(expected.item(), abs=1e-5)
    constant = value_loss(values, values, torch.ones(40), torch.full((40,), 1 / 40), clip=None)
    assert mean_metrics(constant[1])["explained_variance"] == 0.0


def test_entropy_loss_is_minus_the_weighted_entropy():
    entropy = tensor([1.0, 3.0, math.nan], requires_grad=True)
    loss, metrics = entropy_loss(entropy, tensor([0.5, 0.25, 0.0]))
    assert loss.item() == -1.25 and mean_metrics(metrics)["entropy"] == 2.0
    loss.backward()
    assert entropy.grad.tolist() == [-0.5, -0.25, 0.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 1.8),
        ("sequence_mean_token_sum", 4.5),
        ("sequence_mean_token_mean", 3.0),
        ("constant", 9.0 / (2 * 8)),
    ],
)
def test_golden_aggregation(aggregation, expected):
    loss_BR = tensor([[1.0, 1, 1, 1], [5.0, 0, 0, 0]])
    mask = tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    tokens, sequences = count_tokens(mask)
    for count in (lambda n: n, int, float):  # tensors and numbers alike
        weights = token_weights(
            mask, aggregation, n_tokens=count(tokens), n_sequences=count(sequences), constant=8
        )
        assert (weights * loss_BR).sum().item() == pytest.approx(expected, abs=1e-6)


def test_sequences_without_trained_tokens_are_not_counted():
    mask = tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    tokens, sequences = count_tokens(mask)
    assert (tokens.item(), sequences.item()) == (3, 2)


def batch(seed, rows, width):
    """Random log-probs, advantages, …; NaN wherever the mask is 0. Rows may be all masked."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[torch.rand(rows, generator=generator) < 0.2] = False
    return x.masked_fill(~mask, math.nan), mask


def all_losses(x, mask, weights, leaf):
    """Sum of every loss on some rows; `leaf` [rows, R] is what carries the gradient."""
    _, old, advantages, returns, entropy, rollout = x
    policy, policy_metrics = policy_loss(
        leaf,
        old,
        advantages,
        weights,
        **CLIP,
        dual_clip=3.0,
        is_weights=truncated_importance_weights(old, rollout, 1.2),
    )
    value, value_metrics = value_loss(leaf, old, returns, weights, clip=0.2)
    bonus, entropy_metrics = entropy_loss(leaf + entropy, weights)
    return policy + value + bonus, policy_metrics | value_metrics | entropy_metrics


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 8),
    width=st.integers(1, 6),
    aggregation=st.sampled_from(AGGREGATIONS),
    packed=st.booleans(),
)
def test_no_split_permutation_or_packing_changes_loss_gradient_or_metrics(
    seed, rows, width, aggregation, packed
):
    x, mask = batch(seed, rows, width)
    tokens, sequences = count_tokens(mask)
    counts = {"n_tokens": int(tokens), "n_sequences": int(sequences), "constant": 5.0}
    weights = token_weights(mask, aggregation, **counts)
    whole = torch.nan_to_num(x[0]).requires_grad_()
    loss, metrics = all_losses(x, mask, weights, whole)
    loss.backward()
    assert loss.isfinite() and whole.grad.isfinite().all()
    assert not whole.grad[~mask].any()
    assert metrics["tokens"] == tokens

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    pieces = order.tensor_split(int(torch.randint(1, rows + 1, (1,), generator=generator)))
    split = torch.nan_to_num(x[0]).requires_grad_()
    losses, parts = [], []
    for piece in pieces:
        part_weights = token_weights(mask[piece], aggregation, **counts)
        part_x, leaf = x[:, piece], split[piece]
        if packed:  # one flat run of tokens, as in a packed micro-batch
            part_x, leaf, part_weights = part_x.flatten(1), leaf.flatten(), part_weights.flatten()
        part_loss, part_metrics = all_losses(part_x, mask[piece], part_weights, leaf)
        part_loss.backward()
        losses.append(part_loss.detach())
        parts.append(part_metrics)
    torch.testing.assert_close(sum(losses), loss.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(split.grad, whole.grad, atol=1e-9, rtol=1e-9)
    one, many = mean_metrics(metrics), mean_metrics(add_metrics(parts))
    assert one == pytest.approx(many, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fully_masked_micro_batch_gives_zero_loss_and_zero_gradient(aggregation):
    mask = torch.zeros(2, 3)
    weights = token_weights(mask, aggregation, n_tokens=0, n_sequences=0, constant=4.0)
    leaf = torch.zeros(2, 3, requires_grad=True)
    nan = torch.full((6, 2, 3), math.nan)
    loss, metrics = all_losses(nan, mask, weights, leaf)
    loss.backward()
    assert loss.item() == 0.0 and leaf.grad.tolist() == [[0.0] * 3] * 2
    assert all(value.item() == 0 for value in metrics.values())


def test_importance_weights_scale_the_loss_and_are_not_differentiated():
    old = tensor([-1.0, -1.0], requires_grad=True)
    weights = truncated_importance_weights(old, tensor([-1.2, -0.5]), 1.05)
    assert not weights.requires_grad
    loss, _ = policy_loss(
        old, old.detach(), tensor([1.0, 1.0]), torch.ones(2), **CLIP, is_weights=weights
    )
    assert loss.item() == pytest.approx(-(1.05 + math.exp(-0.5)), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: golden_policy_loss(torch.ones(4), dual_clip=1.0), "dual_clip=1.0"),
        (
            lambda: policy_loss(
                GOLDEN_DELTA.bfloat16(), GOLDEN_DELTA, GOLDEN_DELTA, torch.ones(4), **CLIP
            ),
            "must be float32",
        ),
        (
            lambda: value_loss(GOLDEN_DELTA, GOLDEN_DELTA, GOLDEN_DELTA, torch.ones(4), clip=0.0),
            "value clip 0.0",
        ),
        (
            lambda: token_weights(torch.ones(1, 1), "mean", n_tokens=1, n_sequences=1),
            "not one of token_mean",
        ),
        (
            lambda: token_weights(torch.ones(1, 1), "constant", n_tokens=1, n_sequences=1),
            "constant above 0",
        ),
        (
            lambda: token_weights(torch.ones(1, 1), "token_mean", n_tokens=-1, n_sequences=1),
            "got -1",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
