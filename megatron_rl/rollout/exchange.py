"""Spreads the samples of a step over the replicas so that each has about as much to compute, and
takes them to models that are laid out differently.

Prompts move with all their samples, because group advantages need whole groups. Which mini-batch a
sample belongs to is its number in the step (`RolloutBatch.index_B`), so moving it changes who
computes a gradient and not the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.engine.microbatch import balanced_split
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch, concatenate

SLACK = 1.05
"""Samples stay where they are unless the busiest replica gets lighter by more than 5 %."""


def balanced_owners(
    costs: Sequence[float], owners: Sequence[int], dp: int, block: int | None = None
) -> list[int]:
    """Which replica shall compute each prompt.

    Args:
        costs: of each prompt of the step, in order.
        owners: the replica that has it now.
        block: every `block` consecutive prompts (one mini-batch) are balanced by themselves;
            None: all together.
    """
    result = list(owners)
    block = block or max(len(costs), 1)
    for start in range(0, len(costs), block):
        part = range(start, min(start + block, len(costs)))
        split = balanced_split([costs[i] for i in part], dp)
        loads = [sum(costs[i] for i in part if owners[i] == rank) for rank in range(dp)]
        best = max(sum(costs[start + k] for k in chosen) for chosen in split)
        if max(loads) > SLACK * best:
            for rank, chosen in enumerate(split):
                for k in chosen:
                    result[start + k] = rank
    return result


def balance(
    batch: RolloutBatch, groups: ParallelGroups, *, cost: Callable[[int, int], float],
    block: int | None,
) -> RolloutBatch:  # fmt: skip
    """Moves whole prompts between replicas until they have about the same to do.

    Args:
        batch: this replica's samples (possibly none); prompts are numbered 0 … P−1 over all
            replicas in `group_B`.
        cost: of one sample with (tokens, response tokens).
        block: prompts of one mini-batch, see `balanced_owners`.

    Returns:
        This replica's new share in the order of `index_B`.
    """
    dp = groups.layout.dp
    if dp == 1:
        return batch
    mine: dict[int, float] = {}
    for row, group in enumerate(batch.group_B.tolist()):
        tokens = batch.prompt_lengths[row] + batch.response_lengths[row]
        mine[group] = mine.get(group, 0.0) + cost(tokens, batch.response_lengths[row])
    tables: list[dict[int, float]] = [{}] * dp
    dist.all_gather_object(tables, mine, group=groups.data_control())
    owner = {group: rank for rank, table in enumerate(tables) for group in table}
    costs = {group: c for table in tables for group, c in table.items()}
    order = sorted(owner)
    assert order == list(range(len(order))), "prompts must be numbered from 0 over all replicas"
    owners = balanced_owners([costs[g] for g in order], [owner[g] for g in order], dp, block)
    return _move(batch, owners, moved=any(owner[g] != owners[g] for g in order), groups=groups)


def _move(
    batch: RolloutBatch, owners: list[int], *, moved: bool, groups: ParallelGroups
) -> RolloutBatch:
    """Only samples that change their replica travel."""
    if not moved:
        return batch
    rank, target = groups.dp_rank, [owners[g] for g in batch.group_B.tolist()]
    leaving = batch.take([row for row, to in enumerate(target) if to != rank])
    parts: list[RolloutBatch] = [leaving] * groups.layout.dp
    dist.all_gather_object(parts, leaving, group=groups.data_control())
    arrived = [
        part.take([row for row, g in enumerate(part.group_B.tolist()) if owners[g] == rank])
        for part in parts
    ]
    staying = batch.take([row for row, to in enumerate(target) if to == rank])
    joined = concatenate([staying, *arrived])
    return joined.take(joined.index_B.argsort().tolist())


def share_under(
    batch: RolloutBatch, source: ParallelGroups, target: ParallelGroups
) -> RolloutBatch:
    """The samples of a step that this rank's replica of another layout works on.

    Args:
        batch: this rank's samples under `source`.

    Returns:
        Every dp-th sample of the step, so that each mini-batch is spread over all replicas; the
        batch itself where no sample has to move.
    """
    if source.layout == target.layout or source.layout.dp == target.layout.dp == 1:
        return batch
    parts: list[RolloutBatch] = [batch] * source.layout.dp
    dist.all_gather_object(parts, batch, group=source.data_control())
    whole = concatenate([part for part in parts if len(part)])
    order = whole.index_B.argsort().tolist()
    return whole.take(order[target.dp_rank :: target.layout.dp])


def computed_under(
    batch: RolloutBatch, source: ParallelGroups, target: ParallelGroups,
    compute: Callable[[RolloutBatch], Sequence[Tensor]],
) -> list[Tensor]:  # fmt: skip
    """What `compute` gives for the samples of `batch`, computed under another layout.

    Args:
        compute: maps a batch to tensors `[B]` or `[B, R]`, equal on all ranks of a replica.
    """
    share = share_under(batch, source, target)
    results = list(compute(share))
    if share is batch:
        return results
    mine = (share.index_B, results)
    parts = [mine] * target.layout.dp
    dist.all_gather_object(parts, mine, group=target.data_control())
    row_of = {
        index: (part, row)
        for part, (indices, _) in enumerate(parts)
        for row, index in enumerate(indices.tolist())
    }
    places = [row_of[index] for index in batch.index_B.tolist()]
    if not places:
        return [result[:0] for result in results]
    width = batch.mask_BR.shape[1]
    return [
        torch.stack([_fit(parts[part][1][k][row], width) for part, row in places])
        for k in range(len(results))
    ]


def _fit(value: Tensor, width: int) -> Tensor:
    """A number as it is; a row `[R]` padded or cut to `width` (what is cut is padding)."""
    if value.dim() == 0:
        return value
    return pad(value, (0, max(width - len(value), 0)))[:width]
