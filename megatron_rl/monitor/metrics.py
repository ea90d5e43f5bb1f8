"""Names of the losses' metrics: CleanRL's where it has them. docs/metrics.md lists all tags."""

from __future__ import annotations

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
