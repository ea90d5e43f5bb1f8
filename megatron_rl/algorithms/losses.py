"""PPO's losses as sums of weight · per-token loss, so that no split of the batch can change them.

Every function here takes tensors of one shape, padded [B, R] or packed [T], and `weights`: what
`token_weights` made of the *global* token and sequence counts. The loss of the global batch is then
the plain sum of the losses of its micro-batches over all data-parallel ranks. Where the weight is
0 the token is not trained and nothing else about it matters: its values may be NaN.

Metrics are scalars that add up too. Keys that end in `_sum` are sums over trained tokens: add them
over micro-batches and ranks, then divide by the sum of `tokens` (see `metrics.py`). Losses among
them are already normalised by their weights.

Shape suffixes: B sequences, R response positions, padded on the right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "constant",
)

# exp(20) is far outside every clip range, and its product with an advantage is finite in fp32.
MAX_LOG_RATIO = 20.0


def count_tokens(mask_BR: Tensor) -> tuple[Tensor, Tensor]:
    """(trained tokens, sequences with at least one), int64 scalars: sum them over the batch."""
    trained_BR = mask_BR.bool()
    return trained_BR.sum(), trained_BR.any(dim=-1).sum()


def token_weights(
    mask_BR: Tensor,
    aggregation: str,
    *,
    n_tokens: int | float | Tensor,
    n_sequences: int | float | Tensor,
    constant: float | None = None,
) -> Tensor:
    """What each token's loss counts for in the loss of the global mini-batch, [B, R] fp32.

    Args:
        mask_BR: 1 = trained token. A row is one whole sequence.
        aggregation: with ℓ the per-token loss,
            `token_mean`: sum over all tokens of ℓ / n_tokens (DAPO's token-level loss);
            `sequence_mean_token_sum`: mean over sequences of the sum of ℓ;
            `sequence_mean_token_mean`: mean over sequences of the mean of ℓ (GRPO's paper);
            `constant`: mean over sequences of the sum of ℓ / constant (Dr.GRPO, arXiv:2503.20783).
        n_tokens, n_sequences: counts of the whole mini-batch that one optimizer step sees, over all
            ranks and micro-batches (`count_tokens`, summed).
        constant: the normaliser of `constant`, in tokens; usually the longest allowed response.
    """
    mask_BR = mask_BR.to(torch.float32)
    n_sequences = _at_least_one(n_sequences)
    if aggregation == "token_mean":
        return mask_BR / _at_least_one(n_tokens)
    if aggregation == "sequence_mean_token_sum":
        return mask_BR / n_sequences
    if aggregation == "sequence_mean_token_mean":
        return mask_BR / (mask_BR.sum(dim=-1, keepdim=True).clamp_min(1.0) * n_sequences)
    if aggregation == "constant":
        if constant is None or not constant > 0:
            raise ValueError(
                f"aggregation 'constant' needs a constant above 0, got {constant}; the longest "
                "allowed response is the usual choice"
            )
        return mask_BR / (n_sequences * constant)
    raise ValueError(f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}")


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347), asymmetric clip and dual clip included.

    With r = exp(logp - old_logp): ℓ = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for
    A < 0 at most -A · dual_clip (arXiv:1912.09729). clip_high > clip_low is DAPO's clip-higher.

    Args:
        logp: log-probs under the policy being trained; carries the gradient.
        old_logp: log-probs under the policy before the first update of this batch.
        dual_clip: bound on the ratio where the advantage is negative, above 1; None for none.
        is_weights: per-token factors for off-policy rollouts (`truncated_importance_weights`).

    Returns:
        loss, a scalar sum; metrics `policy_loss`, `tokens`, and over the tokens `ratio_sum`,
        `approx_kl_sum` (old - new, the k1 estimate), `approx_kl3_sum` (k3), `clipfrac_sum` (clip
        was active) and `dual_clipfrac_sum`.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1; 3 is usual, None turns it off")
    for name, tensor in (("logp", logp), ("old_logp", old_logp)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {tensor.dtype}: log-probs must be float32, since half precision rounds "
                "a ratio of 0.996 at logp -5 to 1; compute them with vocab_parallel_logprobs"
            )
    live = weights != 0
    delta = torch.where(live, logp - old_logp, 0.0)
    advantages = torch.where(live, advantages, 0.0)
    ratio = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(live)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
    if is_weights is not None:
        loss = loss * torch.where(live, is_weights.detach(), 0.0)
    loss_sum = (weights * loss).sum()
    with torch.no_grad():
        metrics = {
            "policy_loss": loss_sum.detach().clone(),
            "tokens": live.sum(),
            "ratio_sum": torch.where(live, ratio, 0.0).sum(),
            "approx_kl_sum": -delta.sum(),
            "approx_kl3_sum": torch.where(live, ratio - 1.0 - delta, 0.0).sum(),
            "clipfrac_sum": (live & (clipped > unclipped)).sum(),
            "dual_clipfrac_sum": dual_clipped.sum(),
        }
    return loss_sum, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, pessimistic under PPO's value clip.

    ℓ = ½ max((v - R)², (clip(v, v_old - clip, v_old + clip) - R)²); clip=None: ½ (v - R)².

    Returns:
        loss, a scalar sum; metrics `value_loss`, `tokens`, and over the tokens
        `value_clipfrac_sum`, `value_sum`, `return_sum`, `return_sq_sum`, `value_error_sum` and
        `value_error_sq_sum` (error R - v): what explained variance is made of.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip {clip} must be above 0; None turns it off")
    live = weights != 0
    values = torch.where(live, values, 0.0)
    returns = torch.where(live, returns, 0.0)
    error_sq = (values - returns).square()
    loss = error_sq
    clip_active = torch.zeros_like(live)
    if clip is not None:
        old_values = torch.where(live, old_values, 0.0)
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        clipped_error_sq = (clipped - returns).square()
        loss = torch.maximum(error_sq, clipped_error_sq)
        clip_active = clipped_error_sq > error_sq
    loss_sum = 0.5 * (weights * loss).sum()
    with torch.no_grad():
        metrics = {
            "value_loss": loss_sum.detach().clone(),
            "tokens": live.sum(),
            "value_clipfrac_sum": clip_active.sum(),
            "value_sum": values.sum(),
            "return_sum": returns.sum(),
            "return_sq_sum": returns.square().sum(),
            "value_error_sum": (returns - values).sum(),
            "value_error_sq_sum": error_sq.sum(),
        }
    return loss_sum, metrics


def entropy_loss(entropy: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the weighted entropy, to be added with the bonus coefficient in front.

    `entropy` is that of the true vocabulary's distribution (`vocab_parallel_logprobs`), nats.
    Metrics: `entropy_loss`, `tokens`, `entropy_sum` over the tokens.
    """
    live = weights != 0
    entropy = torch.where(live, entropy, 0.0)
    loss_sum = -(weights * entropy).sum()
    metrics = {
        "entropy_loss": loss_sum.detach().clone(),
        "tokens": live.sum(),
        "entropy_sum": entropy.detach().sum(),
    }
    return loss_sum, metrics


def _at_least_one(count: int | float | Tensor) -> float | Tensor:
    """Count as a divisor: an all-masked batch has weights of 0, not 0 / 0."""
    if isinstance(count, Tensor):
        return count.clamp_min(1)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"a global count of tokens or sequences must be >= 0, got {count}")
    return max(count, 1)
