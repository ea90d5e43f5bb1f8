"""Pure layer: KL estimates, their gradients as losses, controllers, and the exact divergence."""

import math
import warnings

import pytest
import torch
from torch import tensor
from torch.autograd import gradcheck

from megatron_rl.algorithms.kl import AdaptiveKL, FixedKL, kl_loss, kl_penalty
from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs
from megatron_rl.algorithms.vocab_kl import vocab_parallel_kl


@pytest.mark.parametrize(
    ("estimator", "value", "swapped", "gradient"),
    [
        ("k1", 0.5, -0.5, 1.0),
        ("abs", 0.5, 0.5, 1.0),
        ("k2", 0.125, 0.125, 0.5),
        ("k3", 0.1065307, 0.1487213, 0.3934693),
    ],
)
def test_golden_estimates_and_gradients(estimator, value, swapped, gradient):
    logp = tensor(-1.0, requires_grad=True)
    kl = kl_penalty(logp, tensor(-1.5), estimator)
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert kl_penalty(tensor(-1.5), tensor(-1.0), estimator).item() == pytest.approx(
        swapped, abs=1e-6
    )


@pytest.mark.parametrize("logp", [-30.0, -300.0, -1e5])
def test_k3_is_clamped_with_a_finite_gradient(logp):
    logp = tensor(logp, requires_grad=True)
    kl = kl_penalty(logp, tensor(-1.0), "k3")
    kl.backward()
    assert kl.item() == 10.0 and logp.grad.item() == 0.0
    assert kl_penalty(tensor(-30.0), tensor(-1.0), "k3", clamp=3.0).item() == 3.0
    assert kl_penalty(tensor(-3.0), tensor(-1.0), "k3", clamp=None).item() == pytest.approx(
        math.exp(2) - 3, rel=1e-6
    )


def test_other_estimates_are_not_clamped():
    logp, ref = tensor(-1.0), tensor(-41.0)
    assert [kl_penalty(logp, ref, e).item() for e in ("k1", "abs", "k2")] == [40.0, 40.0, 800.0]


def test_estimates_average_to_the_exact_divergence():
    logits, ref = torch.randn(2, 1, 6)
    layout = {"group": None, "vocab_start": 0, "vocab_size": 6}
    exact = vocab_parallel_kl(logits, ref, **layout)
    tokens = torch.arange(6)
    logp = vocab_parallel_logprobs(logits.expand(6, 6), tokens, **layout)
    ref_logp = vocab_parallel_logprobs(ref.expand(6, 6), tokens, **layout)
    for estimator in ("k1", "k3"):
        mean = (logp.exp() * kl_penalty(logp, ref_logp, estimator, clamp=None)).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-5)


def test_kl_loss_is_a_weighted_sum_and_ignores_untrained_tokens():
    logp = tensor([-1.0, -2.0, math.nan], requires_grad=True)
    loss, metrics = kl_loss(logp, tensor([-1.5, -1.0, 5.0]), tensor([0.5, 0.25, 0.0]), "k2")
    assert loss.item() == pytest.approx(0.5 * 0.125 + 0.25 * 0.5)
    assert metrics["kl_sum"].item() == pytest.approx(0.625) and metrics["tokens"] == 2
    loss.backward()
    torch.testing.assert_close(logp.grad, tensor([0.25, -0.25, 0.0]))


def test_k1_as_a_loss_warns():
    arguments = (torch.zeros(1), torch.zeros(1), torch.ones(1))
    with pytest.warns(UserWarning, match="zero expected gradient"):
        kl_loss(*arguments, "k1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ("abs", "k2", "k3"):
            kl_loss(*arguments, estimator)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4' is not one of k1, abs, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_golden_adaptive_coefficient():
    controller = AdaptiveKL(0.2, target=6.0, horizon=10000)
    controller.update(12.0, 256)
    assert controller.coef == pytest.approx(0.2010240, abs=1e-7)
    controller.update(6.0, 256)
    assert controller.coef == pytest.approx(0.2010240, abs=1e-7)
    controller.update(5.4, 10000)  # error -0.1, not clipped
    assert controller.coef == pytest.approx(0.2010240 * 0.9, abs=1e-7)
    controller.update(0.0, 10000)
    assert controller.coef == pytest.approx(0.2010240 * 0.9 * 0.8, abs=1e-7)


def test_coefficient_survives_a_checkpoint():
    controller = AdaptiveKL(0.2, target=6.0, horizon=100)
    controller.update(9.0, 32)
    resumed = AdaptiveKL(0.2, target=6.0, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    controller.update(2.0, 32)
    resumed.update(2.0, 32)
    assert resumed.coef == controller.coef != 0.2


def test_fixed_coefficient_stays():
    controller = FixedKL(0.05)
    controller.update(100.0, 1000)
    assert controller.coef == 0.05
    other = FixedKL(0.0)
    other.load_state_dict(controller.state_dict())
    assert other.coef == 0.05


def test_controllers_refuse_what_would_poison_the_coefficient():
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="KL coefficient"):
            FixedKL(bad)
    with pytest.raises(ValueError, match="target=0"):
        AdaptiveKL(0.1, target=0, horizon=1)
    controller = AdaptiveKL(0.1, target=1, horizon=1)
    with pytest.raises(ValueError, match="nan"):
        controller.update(math.nan, 1)
    assert controller.coef == 0.1


def test_golden_exact_divergence_and_entropy():
    p = tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    q = tensor([[0.4, 0.4, 0.2]], dtype=torch.float64).log()
    layout = {"group": None, "vocab_start": 0, "vocab_size": 3}
    assert vocab_parallel_kl(p, q, **layout).item() == pytest.approx(0.0252671539, abs=1e-10)
    _, entropy = vocab_parallel_logprobs(p, tensor([0]), **layout, with_entropy=True)
    assert entropy.item() == pytest.approx(1.0296530, abs=1e-7)


def test_exact_divergence_gradcheck_with_padding_and_temperature():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, 6, dtype=torch.float64)

    def fn(x):
        return vocab_parallel_kl(
            x, ref, group=None, vocab_start=0, vocab_size=5, temperature=0.7, chunk=2
        )

    assert gradcheck(fn, (logits,))


def test_exact_divergence_refuses_another_vocabulary():
    with pytest.raises(ValueError, match="one vocabulary"):
        vocab_parallel_kl(
            torch.zeros(1, 4), torch.zeros(1, 5), group=None, vocab_start=0, vocab_size=4
        )
