"""How far the policy that generated is from the policy that trains, and what to do about it.

The same weights give slightly different log-probs in generation and in training (other kernels,
other precision, stale weights). With Δ = logp(training, before the update) - logp(generation):

* `drift_metrics` measures it, every step;
* `truncated_importance_weights` multiplies each token's loss by min(exp Δ, cap);
* `sequence_drift_mask` drops sequences that have drifted too far altogether.

Shapes are free unless named: B sequences, R response positions. Values where the mask is 0 may be
anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import MAX_LOG_RATIO


def truncated_importance_weights(old_logp: Tensor, rollout_logp: Tensor, cap: float) -> Tensor:
    """min(exp(old_logp - rollout_logp), cap) per token, detached.

    To be passed to `policy_loss` as `is_weights`, which ignores untrained tokens.
    """
    if not cap > 0:
        raise ValueError(f"the importance-sampling cap={cap} must be above 0; 2 is usual")
    delta = (old_logp - rollout_logp).detach()
    return delta.clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap)


def sequence_drift_mask(
    old_logp_BR: Tensor, rollout_logp_BR: Tensor, mask_BR: Tensor, *, threshold: float
) -> Tensor:
    """The mask without the sequences whose mean ratio is outside [1/threshold, threshold].

    The mean is geometric, exp(mean Δ over the trained tokens), so it does not shrink or explode
    with length. A NaN in a trained token drops its sequence.
    """
    if not threshold > 1:
        raise ValueError(
            f"algorithm.importance_sampling.sequence_mask_threshold={threshold} must be above 1: "
            "it bounds a sequence's mean ratio from both sides"
        )
    live_BR = mask_BR.bool()
    delta_BR = torch.where(live_BR, old_logp_BR - rollout_logp_BR, 0.0)
    mean_B = delta_BR.sum(dim=-1) / live_BR.sum(dim=-1).clamp_min(1)
    keep_B = mean_B.abs().exp() <= threshold
    return mask_BR * keep_B[:, None].to(mask_BR.dtype)


def drift_metrics(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """What to log of Δ: `tokens`, and over the tokens `drift_abs_sum` (|Δ|), `drift_kl3_sum`
    (k3 of generation against training), `drift_outside_sum` (ratio outside the policy clip), and
    `drift_abs_max`, which is reduced by max.
    """
    live = mask.bool()
    delta = torch.where(live, old_logp - rollout_logp, 0.0).detach()
    ratio = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
    size = delta.abs()
    return {
        "tokens": live.sum(),
        "drift_abs_sum": size.sum(),
        "drift_abs_max": size.max() if size.numel() else size.new_zeros(()),
        "drift_kl3_sum": (ratio - 1.0 - delta).sum(),
        "drift_outside_sum": outside.sum(),
    }
