"""Advantage estimators on response-aligned batches: GAE, GRPO, RLOO, REINFORCE++.

`mask_BR` is 1 on trained response tokens. Positions where it is 0 (padding, and tool output in the
middle of a response) are skipped as if the row had been compressed: values there may be anything,
NaN included, and results there are 0.

Shape suffixes: B sequences, R response positions (right padded), C positions of one chunk,
K chunks, G groups of samples of one prompt.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.whitening import whiten

# Discounted sums run serially over chunks of this many tokens and as one matmul inside them.
CHUNK = 128


def gae(
    rewards_BR: Tensor,
    values_BR: Tensor,
    mask_BR: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438).

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γ λ A_{t+1},  R_t = A_t + V_t, over the trained
    tokens of each row alone.

    Args:
        lam: λ, or one λ per row [B] (`length_adaptive_lambda`).
        bootstrap_B: V after the last token: the critic's value of the last state for a response cut
            by a limit, 0 for a finished one (`bootstrap_values`). None: all finished.

    Returns:
        advantages_BR, returns_BR.
    """
    _check_shapes(rewards_BR, values_BR, mask_BR)
    order_BR, live_BR, length_B = _compress(mask_BR)
    rewards_BR = torch.where(live_BR, rewards_BR.gather(1, order_BR), 0.0)
    values_BR = torch.where(live_BR, values_BR.gather(1, order_BR), 0.0)
    next_BR = torch.cat([values_BR[:, 1:], torch.zeros_like(values_BR[:, :1])], dim=1)
    if bootstrap_B is not None:
        last_B1 = (length_B - 1).clamp_min(0)[:, None]
        next_BR.scatter_(1, last_B1, bootstrap_B[:, None].to(next_BR.dtype))
    delta_BR = torch.where(live_BR, rewards_BR + gamma * next_BR - values_BR, 0.0)
    advantages_BR = discounted_suffix_sums(delta_BR, gamma * lam)
    returns_BR = torch.where(live_BR, advantages_BR + values_BR, 0.0)
    return _expand(advantages_BR, order_BR), _expand(returns_BR, order_BR)


def discounted_suffix_sums(x_BR: Tensor, discount: float | Tensor, chunk: int = CHUNK) -> Tensor:
    """y_t = x_t + discount · y_{t+1} along the rows; `discount` is a number or one per row [B].

    A row of R tokens takes R / chunk serial steps: inside a chunk the recurrence is a product with
    the triangular matrix of discount powers, which are at most 1 and so can't amplify rounding.
    """
    n_rows, width = x_BR.shape
    chunks = -(-width // chunk)
    x_BR = torch.nn.functional.pad(x_BR, (0, chunks * chunk - width))
    x_BKC = x_BR.view(n_rows, chunks, chunk)
    discount_B = torch.as_tensor(discount, dtype=x_BR.dtype, device=x_BR.device)
    discount_B11 = torch.atleast_1d(discount_B)[:, None, None]
    position_C = torch.arange(chunk, device=x_BR.device)
    distance_CC = position_C[:, None] - position_C[None, :]
    powers_BCC = (discount_B11 ** distance_CC.clamp_min(0)).tril()
    within_BKC = x_BKC @ powers_BCC
    to_next_BC = discount_B11.squeeze(-1) ** (chunk - position_C)
    y_BKC = torch.empty_like(within_BKC)
    carry_B1 = x_BR.new_zeros(n_rows, 1)
    for k in reversed(range(chunks)):
        y_BKC[:, k] = within_BKC[:, k] + to_next_BC * carry_B1
        carry_B1 = y_BKC[:, k, :1]
    return y_BKC.reshape(n_rows, chunks * chunk)[:, :width]


def group_advantages(
    scores_B: Tensor,
    group_B: Tensor,
    *,
    std: Literal["sample", "population", "none"],
    eps: float = 1e-6,
) -> Tensor:
    """GRPO (arXiv:2402.03300): (score - group mean) / (group std + eps), [B].

    Args:
        group_B: id of the prompt that each sample answers, any integers in any order. Whole groups
            must be passed: compute this before samples are spread over ranks.
        std: `sample` divides by n - 1, `population` by n, `none` leaves the difference alone
            (Dr.GRPO, arXiv:2503.20783). A group of one or of equal scores gets 0.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std={std!r} must be sample, population or none")
    centred_B, group_B, count_G = _centre(scores_B, group_B)
    if std != "none":
        square_G = torch.zeros_like(count_G).index_add_(0, group_B, centred_B.square())
        freedom_G = count_G - 1 if std == "sample" else count_G
        std_G = (square_G / freedom_G.clamp_min(1)).sqrt()
        centred_B = centred_B / (std_G[group_B] + eps)
    return centred_B.to(scores_B.dtype)


def rloo(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): score - mean of the group's other scores, [B].

    Whole groups of at least two must be passed.
    """
    centred_B, group_B, count_G = _centre(scores_B, group_B)
    if bool((count_G < 2).any()):
        raise ValueError(
            "leave-one-out needs at least 2 samples of every prompt and a group here has 1; set "
            "rollout.n to 2 or more"
        )
    return (centred_B * (count_G / (count_G - 1))[group_B]).to(scores_B.dtype)


def reinforce_plus_plus(
    rewards_BR: Tensor,
    mask_BR: Tensor,
    gamma: float,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over the global batch.

    `group` is the data-parallel group that holds the batch. Returns (advantages_BR, returns_BR).
    """
    _check_shapes(rewards_BR, mask_BR)
    order_BR, live_BR, _ = _compress(mask_BR)
    rewards_BR = torch.where(live_BR, rewards_BR.gather(1, order_BR), 0.0)
    returns_BR = _expand(discounted_suffix_sums(rewards_BR, gamma), order_BR)
    return whiten(returns_BR, mask_BR, group=group), returns_BR


def reinforce_plus_plus_baseline(
    scores_B: Tensor,
    group_B: Tensor,
    mask_BR: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """REINFORCE++ with the group's mean score as baseline, [B, R].

    Each token of a response carries score - group mean; then all are whitened over the global
    batch. There is no division by the group's own std. KL belongs in the loss here.
    """
    centred_B, _, _ = _centre(scores_B, group_B)
    return whiten(broadcast_to_tokens(centred_B.to(scores_B.dtype), mask_BR), mask_BR, group=group)


def broadcast_to_tokens(advantages_B: Tensor, mask_BR: Tensor) -> Tensor:
    """One advantage per sequence, given to each of its trained tokens and 0 elsewhere."""
    return torch.where(mask_BR.bool(), advantages_B[:, None], 0.0)


def length_adaptive_lambda(length_B: Tensor, alpha: float) -> Tensor:
    """λ = 1 - 1 / (α l) for a response of l tokens, at least 0 (VAPO, arXiv:2504.05118).

    Then sum_t λ^t ≈ α l: the horizon grows with the response. α = 0.05 is the paper's.
    """
    if not alpha > 0:
        raise ValueError(f"the length-adaptive λ needs alpha above 0, got {alpha}; 0.05 is usual")
    return (1.0 - 1.0 / (alpha * length_B.clamp_min(1).to(torch.float32))).clamp_min(0.0)


def _compress(mask_BR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order that moves each row's trained tokens to the front, where they then are, how many."""
    mask_BR = mask_BR.bool()
    order_BR = torch.argsort(~mask_BR, dim=1, stable=True)
    length_B = mask_BR.sum(dim=1)
    live_BR = torch.arange(mask_BR.shape[1], device=mask_BR.device) < length_B[:, None]
    return order_BR, live_BR, length_B


def _expand(compressed_BR: Tensor, order_BR: Tensor) -> Tensor:
    """Back from the compressed rows to response positions."""
    return torch.empty_like(compressed_BR).scatter_(1, order_BR, compressed_BR)


def _centre(scores_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(score - group mean, group index, group sizes) in float64.

    In fp32 a group of equal scores keeps a rounding residue, which 1 / (std + eps) blows up.
    """
    if scores_B.shape != group_B.shape or scores_B.dim() != 1:
        raise ValueError(
            f"scores and group ids must both have shape [B], got {tuple(scores_B.shape)} and "
            f"{tuple(group_B.shape)}"
        )
    scores_B = scores_B.double()
    _, index_B, size_G = group_B.unique(return_inverse=True, return_counts=True)
    size_G = size_G.double()
    mean_G = torch.zeros_like(size_G).index_add_(0, index_B, scores_B) / size_G
    return scores_B - mean_G[index_B], index_B, size_G


def _check_shapes(*tensors_BR: Tensor) -> None:
    shapes = [tuple(t.shape) for t in tensors_BR]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ValueError(f"rewards, values and mask must all be [B, R], got {shapes}")
