"""Names of everything that is logged, and seconds per phase.

Names follow CleanRL where it has them; docs/metrics.md lists them all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = (
    "generation", "scoring", "old_logprobs", "ref_logprobs", "values", "advantages",
    "update_critic", "update_actor", "checkpoint", "evaluation",
)  # fmt: skip

ACTOR_NAMES = {
    "policy_loss": "policy/loss", "ratio": "policy/ratio", "approx_kl": "policy/approx_kl",
    "approx_kl3": "policy/approx_kl3", "clipfrac": "policy/clipfrac",
    "dual_clipfrac": "policy/dual_clipfrac", "entropy": "policy/entropy",
    "kl_loss": "kl/loss", "kl": "kl/ref_loss_estimate",
    "drift_abs": "drift/mean_abs", "drift_abs_max": "drift/max_abs", "drift_kl3": "drift/kl3",
    "drift_outside": "drift/outside_clip",
}  # fmt: skip
CRITIC_NAMES = {
    "value_loss": "value/loss", "value_clipfrac": "value/clipfrac", "value": "value/mean",
    "return": "value/return", "explained_variance": "value/explained_variance",
}  # fmt: skip


class PhaseTimer:
    """Wall-clock seconds of each phase of a step; the device is drained at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name in PHASES, f"{name!r} is not one of {PHASES}"
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, {}
        return seconds
