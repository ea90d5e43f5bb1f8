"""KL divergence from a reference policy: estimates from sampled tokens, and its coefficient.

With d = logp - ref_logp of a sampled token, the estimates of KL(policy ‖ reference) are
(J. Schulman, "Approximating KL divergence", 2020):

    k1 = d            abs = |d|            k2 = d² / 2            k3 = exp(-d) + d - 1

The exact divergence over the whole vocabulary is in `vocab_kl.py`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

ESTIMATORS = ("k1", "abs", "k2", "k3")

# exp(60) squared still fits fp32, so neither k3 nor its gradient overflows before the clamp.
MAX_EXPONENT = 60.0


def kl_penalty(
    logp: Tensor, ref_logp: Tensor, estimator: str, clamp: float | None = 10.0
) -> Tensor:
    """Per-token KL estimate, any shape.

    Args:
        clamp: bound on k3's value, the only estimate that grows exponentially: one token that the
            reference finds far likelier would swamp a batch. A clamped token has no gradient. The
            other estimates are never clamped. None: no bound.

    Differentiable in `logp`; as a loss the gradients per token are k1: 1, abs: sign d, k2: d,
    k3: 1 - exp(-d). In expectation over the policy's own samples k2's is the gradient of the
    reverse KL, k3's that of the forward KL, and k1's is zero: use k1 in the reward only.
    """
    delta = logp - ref_logp
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "k3":
        k3 = (-delta).clamp(max=MAX_EXPONENT).exp() + delta - 1.0
        return k3 if clamp is None else k3.clamp(max=clamp)
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}")


def kl_loss(
    logp: Tensor,
    ref_logp: Tensor,
    weights: Tensor,
    estimator: str,
    clamp: float | None = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL as a loss: (sum of weight · estimate, metrics `kl_loss`, `tokens`, `kl_sum`).

    To be added with the KL coefficient in front. `weights` as for `policy_loss`.
    """
    if estimator == "k1":
        warnings.warn(
            "KL estimator k1 as a loss has zero expected gradient: it adds noise and does not hold "
            "the policy near the reference; use k2 or k3, or put k1 in the reward",
            stacklevel=2,
        )
    delta = torch.where(weights != 0, logp - ref_logp, 0.0)
    return weighted_kl(kl_penalty(delta, torch.zeros_like(delta), estimator, clamp), weights)


def weighted_kl(kl: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Any per-token divergence as a loss: what `kl_loss` returns, also for the exact KL of
    `vocab_kl.py`. Untrained tokens may hold anything."""
    live = weights != 0
    kl = torch.where(live, kl, 0.0)
    loss_sum = (weights * kl).sum()
    metrics = {
        "kl_loss": loss_sum.detach().clone(),
        "tokens": live.sum(),
        "kl_sum": kl.detach().sum(),
    }
    return loss_sum, metrics


class FixedKL:
    """A KL coefficient that stays."""

    def __init__(self, coef: float) -> None:
        self.coef = _checked_coef(coef)

    def update(self, kl: float, n: int) -> None:
        """Nothing to do; here so that the trainer need not ask which controller it has."""

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = _checked_coef(state["coef"])


class AdaptiveKL:
    """A coefficient steered towards a target KL (arXiv:1909.08593, section 2.2).

    coef ← coef · (1 + clip(kl / target - 1, -0.2, 0.2) · n / horizon)
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(
                f"the adaptive KL's target={target} and horizon={horizon} must be above 0: the "
                "KL to hold per response (nats) and the samples over which to correct"
            )
        self.coef = _checked_coef(coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Adjust after a step of `n` samples whose mean KL, in the target's unit, was `kl`."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}: the coefficient would be lost with it")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = _checked_coef(state["coef"])


def _checked_coef(coef: float) -> float:
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"the KL coefficient {coef} must be a finite number, at least 0")
    return float(coef)
