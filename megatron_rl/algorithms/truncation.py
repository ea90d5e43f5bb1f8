"""Exact top-k and top-p over vocabulary shards, as one threshold per row.

Both filters keep the tokens whose logit is at least some t. The largest t that keeps enough of them
is found bit by bit on the integers that order the same way as floats, so that it is exact: each
round sends one number per token (how many logits, or how much probability, lie at or above a
candidate) and the vocabulary itself is never gathered. Equal logits are kept or dropped together.

Generation masks with this threshold, and training hands it to `vocab_parallel_logprobs`.

Shape suffixes: T tokens, V columns of this rank's vocabulary shard, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.vocab_shard import (
    VocabShard,
    check_temperature,
    row_chunks,
    tempered,
)


@torch.no_grad()
def truncation_threshold_T(
    logits_TV: Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    group: dist.ProcessGroup | None,
    *,
    vocab_start: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """The smallest logit that top-k and then top-p keep in each row, [T] fp32.

    A token is kept if its (untempered, fp32) logit is >= the threshold.

    Args:
        top_k: tokens to keep, 0 for all; a number or one per row [T].
        top_p: keep the most likely tokens until their probability, tempered and among those that
            top-k kept, reaches this; above 0, 1 for all; a number or one per row [T].
        group, vocab_start, vocab_size, padded_vocab_size, chunk: see `vocab_parallel_logprobs`.

    Ties at the boundary are all kept. Where nothing is dropped the threshold is -inf. Every rank of
    `group` must call this with the same T, top_k, top_p, temperature and chunk.
    """
    check_temperature(temperature)
    shard = VocabShard.of(
        logits_TV,
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
    )
    n_rows, device = logits_TV.shape[0], logits_TV.device
    top_k_T = torch.as_tensor(top_k, device=device).expand(n_rows)
    top_p_T = torch.as_tensor(top_p, dtype=torch.float64, device=device).expand(n_rows)
    use_top_k, use_top_p = _check_limits(top_k, top_p)
    threshold_T = torch.full((n_rows,), -torch.inf, device=device)
    for rows in row_chunks(n_rows, chunk):
        logits_CV = logits_TV[rows, : shard.valid].float()
        key_CV = _ordered_int(logits_CV)
        if use_top_k:
            threshold_T[rows] = _top_k_threshold(key_CV, top_k_T[rows], shard)
        if use_top_p:
            max_C1 = shard.row_max(logits_TV[rows]).float()[:, None] / temperature
            mass_CV = tempered(logits_CV, temperature).sub_(max_C1).exp_()
            mass_CV.masked_fill_(logits_CV < threshold_T[rows, None], 0.0)
            top_p_C = _top_p_threshold(key_CV, mass_CV, top_p_T[rows], shard)
            threshold_T[rows] = torch.maximum(threshold_T[rows], top_p_C)
    return threshold_T


def _top_k_threshold(key_CV: Tensor, top_k_C: Tensor, shard: VocabShard) -> Tensor:
    def at_least_k(candidate_C: Tensor) -> Tensor:
        count_C = shard.sum_((key_CV >= candidate_C[:, None]).sum(dim=-1))
        return count_C >= top_k_C

    threshold_C = _largest_key(at_least_k, key_CV)
    all_kept_C = (top_k_C <= 0) | (top_k_C >= shard.vocab_size)
    return threshold_C.masked_fill_(all_kept_C, -torch.inf)


def _top_p_threshold(key_CV: Tensor, mass_CV: Tensor, top_p_C: Tensor, shard: VocabShard) -> Tensor:
    total_C = shard.sum_(mass_CV.sum(dim=-1, dtype=torch.float64))

    def enough_mass(candidate_C: Tensor) -> Tensor:
        above_CV = torch.where(key_CV >= candidate_C[:, None], mass_CV, 0.0)
        return shard.sum_(above_CV.sum(dim=-1, dtype=torch.float64)) >= top_p_C * total_C

    threshold_C = _largest_key(enough_mass, key_CV)
    return threshold_C.masked_fill_(top_p_C >= 1.0, -torch.inf)


def _largest_key(enough: Callable[[Tensor], Tensor], key_CV: Tensor) -> Tensor:
    """Largest float t of each row for which `enough(ordered int of t)` holds.

    `enough` must hold for the smallest int and be monotone; then the t found is one of the row's
    logits, on whichever shard. 32 rounds: one for each bit of a float32.
    """
    best_C = key_CV.new_full((key_CV.shape[0],), torch.iinfo(torch.int32).min, dtype=torch.int64)
    for bit in reversed(range(32)):
        candidate_C = best_C + (1 << bit)
        best_C = torch.where(enough(candidate_C.int()), candidate_C, best_C)
    key_C = best_C.int()
    return torch.where(key_C >= 0, key_C, key_C ^ 0x7FFFFFFF).view(torch.float32)


def _ordered_int(x: Tensor) -> Tensor:
    """int32 that compares like the float32: negative floats have their other bits flipped.

    -0.0 comes out below 0.0; the threshold is compared as a float, so both are kept all the same.
    """
    bits = x.view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _check_limits(top_k: int | Tensor, top_p: float | Tensor) -> tuple[bool, bool]:
    """Whether each filter is on; numbers are checked, per-row tensors are the caller's to check."""
    if not isinstance(top_k, Tensor) and top_k < 0:
        raise ValueError(f"top_k={top_k} must be at least 1, or 0 to keep every token")
    if not isinstance(top_p, Tensor) and not 0 < top_p <= 1:
        raise ValueError(
            f"top_p={top_p} must be above 0 and at most 1 (1 keeps every token); for greedy "
            "decoding use temperature 0 in generation"
        )
    use_top_k = isinstance(top_k, Tensor) or top_k > 0
    return use_top_k, isinstance(top_p, Tensor) or top_p < 1
