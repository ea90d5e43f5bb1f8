"""From scores to per-token rewards, and which samples are trained at all.

`length_B` counts the real response tokens of a row (the first EOS included), `finished_B` says
whether it ended by itself rather than by a length limit; `response_ends` computes both.

Shape suffixes: B sequences, R response positions (right padded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def response_ends(
    tokens_BR: Tensor, generated_B: Tensor, stop_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Where each response ends: (length_B int64, finished_B bool).

    Args:
        tokens_BR: response token ids; positions from `generated_B` on are padding. A pad id equal
            to an EOS id is no problem: padding is told by position.
        generated_B: tokens that were generated for each row.
        stop_ids: every id that ends a response.

    The first stop token counts as part of the response; a response without one keeps all its
    tokens and is unfinished.
    """
    position_R = torch.arange(tokens_BR.shape[1], device=tokens_BR.device)
    stop_S = torch.tensor(list(stop_ids), dtype=tokens_BR.dtype, device=tokens_BR.device)
    stop_BR = torch.isin(tokens_BR, stop_S) & (position_R < generated_B[:, None])
    finished_B = stop_BR.any(dim=1)
    first_stop_B = stop_BR.int().argmax(dim=1)
    return torch.where(finished_B, first_stop_B + 1, generated_B.long()), finished_B


def at_last_token(x_BR: Tensor, length_B: Tensor) -> Tensor:
    """Value of each row's last real token, [B]: what a sequence-level reward head reports.

    `length_B` must be at least 1 everywhere; padding behind it is never read.
    """
    if length_B.numel() and not length_B.is_cuda and int(length_B.min()) < 1:
        raise ValueError("a row has no token to take the last one of; drop empty rows first")
    return x_BR.gather(1, (length_B.long() - 1)[:, None]).squeeze(1)


def response_rewards(
    scores_B: Tensor,
    kl_BR: Tensor | None,
    kl_coef: float,
    mask_BR: Tensor,
    length_B: Tensor,
) -> Tensor:
    """-kl_coef · KL on each trained token, plus the score on the last one of the row, [B, R].

    "Last" is the last trained token among the `length_B` real ones, never a pad. If tool output
    ends the response, the score goes to the trained token before it, since every estimator skips
    the tool's tokens. A row without trained tokens gets zeros. `kl_BR=None`: score only.
    """
    position_R = torch.arange(mask_BR.shape[1], device=mask_BR.device)
    live_BR = mask_BR.bool() & (position_R < length_B[:, None])
    last_B = torch.where(live_BR, position_R, -1).amax(dim=1)
    is_last_BR = position_R == last_B[:, None]
    rewards_BR = torch.where(is_last_BR, scores_B[:, None], 0.0)
    if kl_BR is not None:
        rewards_BR = rewards_BR - torch.where(live_BR, kl_coef * kl_BR, 0.0)
    return rewards_BR


def missing_eos_penalty(scores_B: Tensor, finished_B: Tensor, penalty: float | None) -> Tensor:
    """Scores, less `penalty` for a response that was cut by a limit. None or 0: unchanged.

    With a penalty a cut response counts as over: see `bootstrap_values`.
    """
    if penalty is not None and penalty < 0:
        raise ValueError(
            f"algorithm.missing_eos_penalty={penalty} must be at least 0: it is subtracted"
        )
    return torch.where(finished_B, scores_B, scores_B - (penalty or 0.0))


def bootstrap_values(
    value_after_B: Tensor, finished_B: Tensor, missing_eos_penalty: float | None = None
) -> Tensor:
    """The value that GAE continues with after the last token, [B].

    A finished response is over: 0. One cut by a limit would have gone on, so the critic's value of
    its last state stands for the rest. With a missing-EOS penalty the cut *is* the outcome that
    the score judges: bootstrapping on top would pay the policy for a future it is being fined for
    needing, and the two would cancel. Then nothing is bootstrapped.
    """
    if missing_eos_penalty:
        return torch.zeros_like(value_after_B)
    return torch.where(finished_B, 0.0, value_after_B)


def overlong_penalty(length_B: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft punishment of long responses (arXiv:2503.14476), to add to the scores, [B].

    0 up to max_length - buffer tokens, then down in a line to -factor at max_length and beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"overlong buffer={buffer} must be between 1 and max_length={max_length}: it is the "
            "tail of max_length in which the penalty grows"
        )
    excess_B = (length_B - (max_length - buffer)).to(torch.float32) / buffer
    return -factor * excess_B.clamp(0.0, 1.0)


def overlong_filter(mask_BR: Tensor, finished_B: Tensor) -> Tensor:
    """The mask without the rows that a length limit cut: they train nothing."""
    return mask_BR * finished_B[:, None].to(mask_BR.dtype)


def keep_groups(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """DAPO's dynamic sampling: True for samples whose group has different scores, [B] bool.

    A group of equal scores has no advantage to learn from. Whole groups must be passed.
    """
    _, index_B, size_G = group_B.unique(return_inverse=True, return_counts=True)
    low_G = scores_B.new_full(size_G.shape, torch.inf).scatter_reduce_(0, index_B, scores_B, "amin")
    high_G = scores_B.new_full(size_G.shape, -torch.inf)
    high_G.scatter_reduce_(0, index_B, scores_B, "amax")
    return (high_G > low_G)[index_B]
