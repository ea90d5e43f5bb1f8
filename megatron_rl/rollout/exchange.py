"""Spreads the samples of a step over the replicas so that each has about as much to compute.

Prompts move with all their samples, because group advantages need whole groups. Which mini-batch a
sample belongs to is its number in the step (`RolloutBatch.index_B`), so moving it changes who
computes a gradient and not the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

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
