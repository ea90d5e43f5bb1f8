"""Pure layer: top-k and top-p thresholds are exact, without sorting or gathering."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from megatron_rl.algorithms.truncation import truncation_threshold_T


def threshold(logits, top_k, top_p, **kwargs):
    kwargs = {"vocab_start": 0, "vocab_size": logits.shape[1]} | kwargs
    return truncation_threshold_T(logits, top_k, top_p, None, **kwargs)


def by_sorting(row, top_k, top_p, temperature):
    """Set of kept ids: sort, cut at k, renormalise, cut at p; ties of the last one kept."""
    row = row.double()
    ordered = row.sort(descending=True).values
    kept = row >= (ordered[top_k - 1] if 0 < top_k < len(row) else -math.inf)
    if top_p < 1:
        p = (row / temperature).masked_fill(~kept, -math.inf).softmax(0)
        candidates = row[kept].unique().flip(0)
        mass = [p[row >= t].sum().item() for t in candidates]
        enough = next(i for i, m in enumerate(mass) if m >= top_p - 1e-9)
        kept &= row >= candidates[enough]
    return kept


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    columns=st.integers(1, 12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.6]),
    ties=st.booleans(),
)
def test_keeps_what_sorting_keeps(seed, columns, top_k, top_p, temperature, ties):
    logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if ties else logits
    got = threshold(logits, top_k, top_p, temperature=temperature, chunk=2)
    for row, t in zip(logits, got, strict=True):
        expected = by_sorting(row, top_k, top_p, temperature)
        assert torch.equal(row >= t, expected)
        assert t == -math.inf or t == row[expected].min()


def test_limits_may_differ_by_row():
    logits = tensor([[0.0, 1, 2, 3]]).repeat(4, 1)
    got = threshold(logits, tensor([1, 0, 3, 0]), tensor([1.0, 1.0, 1.0, 0.6]))
    assert got.tolist() == [3.0, -math.inf, 1.0, 3.0]


def test_top_p_counts_probability_among_what_top_k_kept():
    logits = tensor([[0.40, 0.35, 0.25]]).log()
    assert threshold(logits, 0, 0.5).item() == logits[0, 1].item()
    assert threshold(logits, 2, 0.5).item() == logits[0, 0].item()  # 0.40 / 0.75 > 0.5


def test_vocabulary_padding_is_never_kept():
    logits = tensor([[0.0, 1.0, 9.0, 9.0]])
    assert threshold(logits, 1, 1.0, vocab_size=2, padded_vocab_size=4).item() == 1.0
    assert threshold(logits, 0, 0.5, vocab_size=2, padded_vocab_size=4).item() == 1.0


def test_negative_zero_equal_logits_and_extremes():
    assert threshold(tensor([[0.0, -0.0, -1.0]]), 1, 1.0).item() == 0.0
    assert threshold(tensor([[5.0, 5.0, 5.0]]), 1, 1.0).item() == 5.0
    assert threshold(tensor([[-3e38, 3e38, -1e-40]]), 2, 1.0).item() == tensor(-1e-40).item()
    assert threshold(tensor([[-math.inf, 1.0, 0.0]]), 0, 0.9).item() == 0.0
    assert threshold(tensor([[1.0, 2.0]], dtype=torch.bfloat16), 1, 1.0).item() == 2.0
    assert threshold(torch.zeros(0, 4), 1, 0.5).shape == (0,)


@pytest.mark.parametrize(
    ("top_k", "top_p", "message"),
    [(-1, 1.0, "top_k=-1"), (0, 0.0, "top_p=0.0"), (0, 1.1, "top_p=1.1")],
)
def test_bad_limits_are_refused(top_k, top_p, message):
    with pytest.raises(ValueError, match=message):
        threshold(torch.zeros(1, 4), top_k, top_p)
