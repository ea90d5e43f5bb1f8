"""A frozen model on ranks of its own, as the ranks that train see it.

Shapes: B samples of this replica, R longest response among them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.frozen.mailbox import Mailbox, Sample
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rewards.model import SampleReader
from megatron_rl.rollout.batch import RolloutBatch

Reader = Callable[[RolloutBatch], list[Tensor]]


class FrozenClient:
    """Sends samples and fetches results; one rank of a replica does so for all.

    Args:
        groups: of the actor's training layout, under which results are fetched.
        read: the model's token ids of every sample of a batch.
        streams: samples are sent as they are completed (by `send`), so that the model works while
            the others are generated; else all at once, when their results are wanted.
    """

    def __init__(
        self, mailbox: Mailbox, groups: ParallelGroups, *, read: Reader, streams: bool
    ) -> None:
        self.mailbox, self.groups = mailbox, groups
        self.read, self.streams = read, streams

    def send(self, batch: RolloutBatch) -> None:
        """Sends samples; to be called by one rank for each sample."""
        columns = zip(
            batch.request_B.tolist(), batch.prompt_lengths, self.read(batch) if len(batch) else [],
            strict=True,
        )  # fmt: skip
        self.mailbox.send([Sample(n, length, ids.tolist()) for n, length, ids in columns])

    def numbers(self, batch: RolloutBatch) -> Tensor:
        """One number per sample, fp32 `[B]`, equal on all ranks of the replica."""
        values = self._results(batch)
        return torch.tensor([number for (number,) in values], dtype=torch.float32)

    def rows(self, batch: RolloutBatch) -> Tensor:
        """One number per response token, fp32 `[B, R]`, 0 on padding."""
        out_BR = torch.zeros_like(batch.mask_BR)
        for row_R, values in zip(out_BR, self._results(batch), strict=True):
            row_R[: len(values)] = torch.tensor(values)
        return out_BR

    def _results(self, batch: RolloutBatch) -> list[list[float]]:
        control = self.groups.control()
        source = dist.get_global_rank(control, 0)
        shared: list = [None]
        if dist.get_rank() == source:
            if not self.streams:
                self.send(batch)
            shared = [self.mailbox.results(batch.request_B.tolist())]
        dist.broadcast_object_list(shared, source, group=control)
        return shared[0]


def clients_of(
    config: Config, groups: ParallelGroups, store: dist.Store | None, *, reader: SampleReader | None
) -> dict[str, FrozenClient]:
    """One for each frozen model on ranks of its own, by role.

    Samples are sent while others are generated, unless last bits may not depend on time (what
    arrives together is computed together) or a sample may be dropped before it is needed.

    Args:
        groups: of the actor.
        reader: of the reward model.
    """
    clients = {}
    for role in config.ranks_apart:
        dropped = role == "reference" and config.algorithm.dynamic_sampling.enable
        clients[role] = FrozenClient(
            Mailbox(store, role, patience=config.runtime.collective_timeout), groups,
            read=reader.sequences if role == "reward" else lambda batch: batch.sequences,
            streams=not (config.training.deterministic or dropped),
        )  # fmt: skip
    return clients
