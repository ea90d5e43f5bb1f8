"""Pure layer: where a response ends, where its score goes, and which samples train."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from megatron_rl.algorithms.advantages import gae
from megatron_rl.algorithms.reward_shaping import (
    at_last_token,
    bootstrap_values,
    keep_groups,
    missing_eos_penalty,
    overlong_filter,
    overlong_penalty,
    response_ends,
    response_rewards,
)

EOS, OTHER_EOS, PAD = 2, 7, 2  # the pad id is an EOS id, as in many checkpoints


def test_response_ends_at_the_first_of_several_stop_ids():
    tokens = tensor(
        [
            [5, 9, EOS, 8, PAD],  # goes on after the first EOS: ends there all the same
            [5, OTHER_EOS, EOS, PAD, PAD],
            [5, 6, 8, 9, PAD],  # cut at 4 tokens, padding looks like EOS
            [5, 6, 8, 9, 4],  # cut at full width: keeps its last token
            [PAD, PAD, PAD, PAD, PAD],  # nothing generated
        ]
    )
    length, finished = response_ends(tokens, tensor([4, 3, 4, 5, 0]), [EOS, OTHER_EOS])
    assert length.tolist() == [3, 2, 4, 5, 0]
    assert finished.tolist() == [True, True, False, False, False]


def test_last_token_is_the_last_real_one_never_a_pad():
    x = tensor([[1.0, 2.0, math.nan], [4.0, 5.0, 6.0], [7.0, math.nan, math.nan]])
    assert at_last_token(x, tensor([2, 3, 1])).tolist() == [2.0, 6.0, 7.0]
    with pytest.raises(ValueError, match="empty rows"):
        at_last_token(x, tensor([2, 0, 1]))


def test_golden_score_sits_on_the_last_real_token():
    # A prompt of 3 and a total of 7 in a row 9 wide: four response tokens, then two pads.
    kl = tensor([[0.5, 0.5, 0.5, 0.5, math.nan, 99.0]])
    mask = tensor([[1, 1, 1, 1, 0, 0]])
    got = response_rewards(tensor([1.0]), kl, 0.1, mask, tensor([4]))
    torch.testing.assert_close(got, tensor([[-0.05, -0.05, -0.05, 0.95, 0.0, 0.0]]))


def test_score_goes_before_closing_tool_output_and_nowhere_without_trained_tokens():
    mask = tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    got = response_rewards(tensor([1.0, 5.0, 3.0]), None, 0.1, mask, tensor([4, 4, 2]))
    assert got.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 3, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), width=st.integers(1, 8))
def test_rewards_of_a_row_add_up_to_score_less_kl(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    scores, kl = torch.randn(rows, generator=generator), torch.randn(rows, width)
    length = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = (torch.rand(rows, width) < 0.8) & (torch.arange(width) < length[:, None])
    mask[:, 0] = True
    rewards = response_rewards(scores, kl.masked_fill(~mask, math.nan), 0.3, mask, length)
    expected = scores - 0.3 * kl.masked_fill(~mask, 0.0).sum(1)
    torch.testing.assert_close(rewards.sum(1), expected, atol=1e-5, rtol=1e-5)
    assert not rewards[~mask].any()


def test_missing_eos_penalty_touches_only_cut_responses():
    scores, finished = tensor([1.0, 1.0]), tensor([True, False])
    assert missing_eos_penalty(scores, finished, 0.5).tolist() == [1.0, 0.5]
    assert missing_eos_penalty(scores, finished, None).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="missing_eos_penalty=-1"):
        missing_eos_penalty(scores, finished, -1)


def test_only_cut_responses_without_a_penalty_bootstrap():
    value, finished = tensor([4.0, math.nan]), tensor([False, True])
    assert bootstrap_values(value, finished).tolist() == [4.0, 0.0]
    assert bootstrap_values(value, finished, 0.0).tolist() == [4.0, 0.0]
    assert bootstrap_values(value, finished, 0.5).tolist() == [0.0, 0.0]


def test_missing_eos_penalty_is_not_paid_back_by_bootstrapping():
    """A cut response with penalty 1 must end worse than without, whatever the critic expects."""
    finished, mask, length = tensor([False]), torch.ones(1, 3), tensor([3])
    returns = {}
    for penalty in (None, 1.0):
        scores = missing_eos_penalty(tensor([0.0]), finished, penalty)
        rewards = response_rewards(scores, None, 0.0, mask, length)
        bootstrap = bootstrap_values(tensor([1.0]), finished, penalty)
        _, returns[penalty] = gae(
            rewards, torch.zeros(1, 3), mask, gamma=1.0, lam=1.0, bootstrap_B=bootstrap
        )
    assert returns[None].tolist() == [[1.0, 1.0, 1.0]]
    assert returns[1.0].tolist() == [[-1.0, -1.0, -1.0]]


def test_golden_overlong_penalty():
    got = overlong_penalty(tensor([1, 16, 18, 20, 25]), max_length=20, buffer=4, factor=1.0)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(tensor([20]), max_length=20, buffer=4, factor=0.5).item() == -0.5
    with pytest.raises(ValueError, match="buffer=21"):
        overlong_penalty(tensor([1]), max_length=20, buffer=21, factor=1.0)


def test_overlong_filter_drops_cut_rows_and_keeps_the_mask_type():
    mask = tensor([[1, 0, 1], [1, 1, 1]])
    got = overlong_filter(mask, tensor([True, False]))
    assert got.dtype == mask.dtype and got.tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dynamic_sampling_keeps_groups_with_different_scores(dtype):
    scores = tensor([0.35, 1.0, 0.35, 0.0, 0.35, 1.0, 0.35], dtype=dtype)
    group = tensor([4, 9, 4, 9, 4, 1, 4])
    assert keep_groups(scores, group).tolist() == [False, True, False, True, False, False, False]
