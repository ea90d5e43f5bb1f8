"""Dynamic sampling (DAPO, arXiv:2503.14476): generate until every group has something to teach.

A group whose responses all got the same score has no advantage under a group baseline. Such groups
are dropped and further prompts are drawn, until a full batch of the others is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.algorithms.reward_shaping import keep_groups
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch, concatenate


def fill_batch(
    draw: Callable[[int], RolloutBatch], *, prompts: int, n: int, max_batches: int,
    groups: ParallelGroups,
) -> tuple[RolloutBatch, dict[str, float]]:  # fmt: skip
    """Draws generation batches until `prompts` groups with different scores are there.

    The first ones in the order of the prompt stream are kept, whatever replica generated them, so
    the result does not depend on the layout; what is beyond a full batch is dropped, because the
    policy of the next step would be another one.

    Args:
        draw: generates and scores one more batch; given the number of samples drawn so far.
        max_batches: generation batches of one step.

    Returns:
        This replica's samples of the batch (possibly none), numbered anew, and metrics.

    Raises:
        RuntimeError: on all ranks, if `max_batches` batches were not enough.
    """
    parts: list[RolloutBatch] = []
    order: list[int] = []
    drawn = torch.zeros(2, dtype=torch.float64)  # samples, their summed scores
    for count in range(1, max_batches + 1):
        batch = draw((count - 1) * prompts * n)
        drawn += torch.tensor([len(batch), float(batch.scores_B.double().sum())])
        kept = batch.take(keep_groups(batch.scores_B, batch.group_B).nonzero()[:, 0].tolist())
        parts.append(kept)
        found: list[list[int]] = [[]] * groups.layout.dp
        mine = kept.group_B.unique().tolist()
        dist.all_gather_object(found, mine, group=groups.data_control())
        order += sorted(sum(found, []))
        if len(order) >= prompts:
            dist.all_reduce(drawn, group=groups.data_control())
            metrics = {
                "sampling/batches": float(count),
                "sampling/kept_groups": len(order) / (count * prompts),
                "sampling/reward_mean": float(drawn[1] / drawn[0]),
            }
            return _numbered(concatenate(parts), order[:prompts], n), metrics
    raise RuntimeError(
        f"algorithm.dynamic_sampling.max_batches = {max_batches}: after as many generation batches "
        f"only {len(order)} of {prompts} prompts have responses with different rewards; use easier "
        "or harder prompts, a larger rollout.n or max_batches, or disable dynamic sampling"
    )


def _numbered(batch: RolloutBatch, order: list[int], n: int) -> RolloutBatch:
    """The samples of the groups in `order`, which become groups 0 … of this step."""
    place = {group: k for k, group in enumerate(order)}
    batch = batch.take([row for row, g in enumerate(batch.group_B.tolist()) if g in place])
    batch.group_B = torch.tensor([place[g] for g in batch.group_B.tolist()], dtype=torch.int64)
    batch.index_B = batch.group_B * n + batch.index_B % n
    return batch
