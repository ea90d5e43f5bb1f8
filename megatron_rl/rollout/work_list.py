"""Prompts that nobody has started yet, shared by the replicas: whoever has room takes the next.

Only where a replica's share does not fit its running sequences as a whole: then a replica whose
responses are short would be done while another still has prompts waiting. A sample's tokens do not
depend on the replica (its noise is keyed by its number), so what changes is who generates it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.parallel import ParallelGroups


class WorkList:
    """This replica's view of a batch's prompts; all its ranks call it alike.

    Args:
        own: prompts that this replica starts with.
        shared: the others, in order, equal on all replicas.
        n: samples per prompt.
        batch: a number that this process group has not used before.
    """

    def __init__(
        self, groups: ParallelGroups, *, own: list[int], shared: list[int], n: int, batch: int
    ) -> None:
        self._own, self._shared, self._n, self._batch = own, shared, n, batch
        self._replica = groups.control()
        self._store = dist.distributed_c10d._get_default_store()

    def take(self, room: int, *, idle: bool) -> list[int] | None:
        """The next prompts.

        Args:
            room: sequences that can start.
            idle: nothing runs: a prompt is given even if its samples need more room.

        Returns:
            As many prompts as have room, possibly none; None when there are no more.
        """
        count = max(room // self._n, int(idle))
        if self._own:
            taken, self._own = self._own[:count], self._own[count:]
            return taken
        if count == 0:
            return []
        start = self._claim(count)
        return self._shared[start : start + count] if start < len(self._shared) else None

    def _claim(self, count: int) -> int:
        """Place of the first of `count` prompts that are this replica's from now on."""
        start = torch.zeros(1, dtype=torch.int64)
        if self._replica.rank() == 0:
            start += self._store.add(f"work_list/{self._batch}", count) - count
        if self._replica.size() > 1:
            dist.broadcast(start, dist.get_global_rank(self._replica, 0), group=self._replica)
        return int(start)
