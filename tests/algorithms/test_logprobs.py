"""Pure layer: log-probs and entropy of one whole vocabulary against dense float64 softmax."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from megatron_rl.algorithms.logprobs import shard_logsumexp, vocab_parallel_logprobs

WHOLE = {"group": None, "vocab_start": 0}


def dense(logits_TV, labels_T, vocab_size, temperature=1.0):
    """(logprobs, entropy) the obvious way, in float64."""
    logp_TV = (logits_TV[:, :vocab_size].double() / temperature).log_softmax(-1)
    return logp_TV.gather(1, labels_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def test_golden_logprobs_entropy_and_entropy_gradient():
    x = torch.tensor([[0.0, 1, 2, 3]]).repeat(4, 1).requires_grad_()
    logp, entropy = vocab_parallel_logprobs(
        x, torch.arange(4), vocab_size=4, with_entropy=True, **WHOLE
    )
    torch.testing.assert_close(
        logp, torch.tensor([-3.4401896, -2.4401896, -1.4401897, -0.4401897]), atol=1e-5, rtol=0
    )
    assert entropy[0].item() == pytest.approx(0.9475370, abs=1e-6)
    entropy[0].backward()
    expected = torch.tensor([0.0799110, 0.1300762, 0.1167010, -0.3266881])
    torch.testing.assert_close(x.grad[0], expected, atol=1e-6, rtol=0)
    assert not x.grad[1:].any()


def test_golden_temperature_is_applied_to_logprob_and_entropy():
    logp, entropy = vocab_parallel_logprobs(
        torch.tensor([[0.0, 1, 2, 3]]),
        torch.tensor([3]),
        vocab_size=4,
        temperature=0.5,
        with_entropy=True,
        **WHOLE,
    )
    assert logp.item() == pytest.approx(-0.1450780, abs=1e-6)
    assert entropy.item() == pytest.approx(0.4554286, abs=1e-6)


def test_golden_vocabulary_padding_has_no_probability_and_no_gradient():
    x = torch.tensor([[0.0, 1, 2, 3]]).repeat(3, 1).requires_grad_()
    logp, entropy = vocab_parallel_logprobs(
        x, torch.arange(3), vocab_size=3, padded_vocab_size=4, with_entropy=True, **WHOLE
    )
    torch.testing.assert_close(
        logp, torch.tensor([-2.4076059, -1.4076059, -0.4076060]), atol=1e-6, rtol=0
    )
    (logp.sum() + entropy.sum()).backward()
    assert not x.grad[:, 3].any()
    poisoned = x.detach().clone()
    poisoned[:, 3] = math.nan
    again = vocab_parallel_logprobs(poisoned, torch.arange(3), vocab_size=3, **WHOLE)
    assert torch.equal(again, logp)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    columns=st.integers(1, 9),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_equals_dense_softmax_forward_and_backward(
    seed, tokens, columns, padding, chunk, temperature, scale
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns + padding, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(columns, (tokens,), generator=generator)
    up, up_entropy = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(
        ours,
        labels,
        vocab_size=columns,
        padded_vocab_size=columns + padding,
        temperature=temperature,
        chunk=chunk,
        with_entropy=True,
        **WHOLE,
    )
    ref_logp, ref_entropy = dense(theirs, labels, columns, temperature)
    torch.testing.assert_close(logp, ref_logp, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(entropy, ref_entropy, atol=1e-11, rtol=1e-11)
    (logp * up + entropy * up_entropy).sum().backward()
    (ref_logp * up + ref_entropy * up_entropy).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_gradcheck(with_entropy, truncated):
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, -1, 4, 5])
    min_logit = torch.full((5,), -0.5, dtype=torch.float64) if truncated else None

    def fn(x):
        return vocab_parallel_logprobs(
            x,
            labels,
            vocab_size=6,
            padded_vocab_size=7,
            temperature=0.7,
            chunk=2,
            with_entropy=with_entropy,
            min_logit_T=min_logit,
            **WHOLE,
        )

    assert gradcheck(fn, (x,))


def test_negative_label_has_zero_logprob_and_zero_gradient():
    x = torch.randn(3, 5, requires_grad=True)
    logp = vocab_parallel_logprobs(x, torch.tensor([1, -1, -100]), vocab_size=5, **WHOLE)
    assert logp[0] < 0 and not logp[1:].any()
    logp.sum().backward()
    assert x.grad[0].any() and not x.grad[1:].any()


def test_half_precision_logits_are_computed_in_fp32_and_get_their_own_dtype_back():
    half = (torch.randn(6, 50) * 4).bfloat16().requires_grad_()
    labels = torch.randint(50, (6,))
    logp, entropy = vocab_parallel_logprobs(half, labels, vocab_size=50, with_entropy=True, **WHOLE)
    ref_logp, ref_entropy = dense(half.detach(), labels, 50)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), ref_logp, atol=3e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), ref_entropy, atol=3e-6, rtol=0)
    (logp.sum() + entropy.sum()).backward()
    assert half.grad.dtype == torch.bfloat16


def test_difference_that_bf16_would_lose_survives():
    # Two log-probs 0.004 apart near -5: the ratio must not round to 1.
    x = torch.tensor([[0.0, -4.9955], [0.0, -4.9995]])
    logp = vocab_parallel_logprobs(x, torch.tensor([1, 1]), vocab_size=2, **WHOLE)
    assert (logp[1] - logp[0]).exp().item() == pytest.approx(0.99603, abs=2e-5)
    assert logp.bfloat16()[0] == logp.bfloat16()[1]


def test_does_not_write_into_the_logits():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(4, 8, dtype=dtype).requires_grad_()
        before = x.detach().clone()
        logp, entropy = vocab_parallel_logprobs(
            x, torch.arange(4), vocab_size=8, with_entropy=True, **WHOLE
        )
        (logp + entropy).sum().backward()
        assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_huge_logits_and_impossible_tokens_stay_finite(temperature):
    x = torch.tensor([[3e4, -3e4, 0.0], [0.0, -math.inf, 1.0]], requires_grad=True)
    logp, entropy = vocab_parallel_logprobs(
        x,
        torch.tensor([0, 2]),
        vocab_size=3,
        temperature=temperature,
        with_entropy=True,
        **WHOLE,
    )
    (logp + entropy).sum().backward()
    assert logp.isfinite().all() and entropy.isfinite().all() and x.grad.isfinite().all()
    assert logp[0] == 0 and entropy[0] == 0


def test_truncated_distribution_is_renormalised_and_the_label_always_counts():
    x = torch.tensor([[0.0, 1, 2, 3]]).repeat(2, 1)
    logp, entropy = vocab_parallel_logprobs(
        x,
        torch.tensor([3, 0]),
        vocab_size=4,
        min_logit_T=torch.tensor([2.0, 2.0]),
        with_entropy=True,
        **WHOLE,
    )
    kept = torch.tensor([2.0, 3]).log_softmax(0)
    assert logp[0].item() == pytest.approx(kept[1].item(), abs=1e-6)
    assert entropy[0].item() == pytest.approx(-(kept.exp() * kept).sum().item(), abs=1e-6)
    # Token 0 was drawn under an older policy and is below the threshold now: finite all the same.
    with_label = torch.tensor([0.0, 2, 3]).log_softmax(0)
    assert logp[1].item() == pytest.approx(with_label[0].item(), abs=1e-6)


def test_logsumexp_equals_torch():
    x = torch.randn(7, 11) * 5
    ours = shard_logsumexp(x, vocab_size=9, temperature=0.6, chunk=3, **WHOLE)
    torch.testing.assert_close(ours, (x[:, :9] / 0.6).logsumexp(-1), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_that_is_no_divisor_is_refused(temperature):
    with pytest.raises(ValueError, match="greedy"):
        vocab_parallel_logprobs(
            torch.zeros(1, 2), torch.tensor([0]), vocab_size=2, temperature=temperature, **WHOLE
        )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"vocab_size": 5}, "not shards of vocab_size=5"),
        ({"vocab_size": 4, "padded_vocab_size": 8}, "never gathered logits"),
        ({"vocab_size": 4, "vocab_start": 2}, "vocab_start=2"),
        ({"vocab_size": 3}, "label 3 is not below vocab_size=3"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": 4, "chunk": 0}, "chunk=0"),
        ({"vocab_size": 4, "labels_T": torch.zeros(2, dtype=torch.int64)}, "shape \\[4\\]"),
        ({"vocab_size": 4, "labels_T": torch.zeros(4)}, "token ids"),
        ({"vocab_size": 4, "logits_TV": torch.zeros(4, 1, 4)}, "flatten"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(kwargs, message):
    arguments = {"logits_TV": torch.zeros(4, 4), "labels_T": torch.arange(4), **WHOLE} | kwargs
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(**arguments)
