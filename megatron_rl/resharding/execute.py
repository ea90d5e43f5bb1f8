"""Run a plan: pack, exchange, unpack, bucket after bucket, the next one already on its way.

Which memory holds what afterwards:

  * a tensor whose generation shard *is* the rank's training shard (norms, and everything where
    only pipeline stages merge) is used in place: the training tensor itself is handed out;
  * any other tensor gets generation memory, into which its own training shard is copied on the
    device and the rest is received. That memory is at most the generation shard, M/(t_g·p_g);
  * two staging buffers of at most a bucket each way are held while a gather runs (and between
    gathers when the memory is kept).

`megatron_rl.resharding.segments` is the alternative that copies no own shard at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.kernels.reshard import BlockCopy, CopyTable, copy_blocks
from megatron_rl.parallel import group_of
from megatron_rl.resharding.arena import Arena
from megatron_rl.resharding.buckets import Transfer
from megatron_rl.resharding.exchange import (
    Traffic,
    build_exchanges,
    pack_copy,
    start_exchange,
    unpack_copy,
)
from megatron_rl.resharding.plan import Plan

SLOTS = 2
"""Staging buffers each way: one on the wire, one being packed or unpacked."""


def new_exchange_group(plan: Plan) -> dist.ProcessGroup | None:
    """Create (or find) the process groups that a plan exchanges in; every rank calls this.

    Returns:
        The group of the calling rank, None when it exchanges nothing.
    """
    return group_of([list(ranks) for ranks in plan.exchange_groups()])


def check_shards(plan: Plan, rank: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError where a rank's tensors are not the training shards the plan expects."""
    for index, spec in enumerate(plan.specs):
        shape = plan.training_shape(rank, index)
        if shape is None:
            continue
        if spec.name not in weights:
            raise ValueError(f"rank {rank} holds {spec.name} in the plan, but was not given it")
        tensor = weights[spec.name]
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, spec.dtype):
            raise ValueError(
                f"{spec.name} on rank {rank} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the plan has {shape} torch.{spec.dtype}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{spec.name} on rank {rank} is not contiguous")


class PlannedExchange:
    """One rank's part of a plan, ready to run; what both forms of generation weights share.

    Args:
        plan: the plan of this rank's training replica.
        rank: global rank.
        weights: training shards by tensor name; read at every `gather`, never written.
        group: the exchange group (`new_exchange_group`), None without one.
        keep: hold the memory between uses. False gives it back in `release`, so that training has
            it; addresses may then change from one gather to the next, which CUDA graphs forbid.
        backend: of the copy kernel, see `megatron_rl.kernels.reshard.copy_blocks`.

    Raises:
        ValueError: when `weights` are not the training shards of the plan.
    """

    collective = True
    """Whether buckets may travel as all-gathers (see exchange.py)."""

    def __init__(
        self, plan: Plan, rank: int, weights: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None, *, keep: bool = True, backend: str = "auto",
    ) -> None:  # fmt: skip
        check_shards(plan, rank, weights)
        self.plan, self.rank, self.keep = plan, rank, keep
        self.traffic = Traffic()
        self._weights, self._group, self._backend = weights, group, backend
        members = sorted(dist.get_process_group_ranks(group)) if group is not None else [rank]
        self._exchanges = build_exchanges(plan, rank, members, collective=self.collective)
        self._device = next((w.device for w in weights.values()), torch.device("cpu"))
        if group is not None and self._device.type == "cuda":
            # NCCL makes its communicator in the first call, which all ranks must join.
            dist.barrier(group=group)


class Resharder(PlannedExchange):
    """Gathers a rank's generation weights from training weights, as often as they change."""

    def __init__(self, plan: Plan, rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, rank, *args, **kwargs)
        self._unchanged = plan.unchanged(rank)
        self._generation = Arena(
            {
                spec.name: (shape, getattr(torch, spec.dtype))
                for index, spec in enumerate(plan.specs)
                if index not in self._unchanged
                and (shape := plan.generation_shape(rank, index)) is not None
            },
            self._device,
        )
        self._staging = Arena(self._staging_layout(), self._device)
        self._tables: list[CopyTable] = []

    def _staging_layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        send = max((e.send_bytes for e in self._exchanges), default=0)
        receive = max((e.receive_bytes for e in self._exchanges), default=0)
        slots = range(min(SLOTS, len(self._exchanges)))
        sizes = {f"send{s}": send for s in slots} | {f"receive{s}": receive for s in slots}
        return {name: ((size,), torch.uint8) for name, size in sizes.items()}

    @property
    def extra_bytes(self) -> int:
        """Bytes of generation weights beyond the training weights, held at this moment."""
        return self._generation.held_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging buffers held at this moment."""
        return self._staging.held_bytes

    @torch.no_grad()
    def gather(self) -> dict[str, torch.Tensor]:
        """Bring the generation weights up to date with the training weights.

        Returns:
            Generation shards by tensor name. The tensors are the same objects every time, so a
            module bound to them once stays bound; treat them as read-only, since those used in
            place are the training tensors.
        """
        self._generation.allocate()
        self._staging.allocate()
        if not self._tables or any(table.stale() for table in self._tables):
            self._tables = self._build_tables()
        own, packs, unpacks = self._tables[0], self._tables[1::2], self._tables[2::2]
        works: dict[int, list[dist.Work]] = {}
        for bucket in range(len(self._exchanges) + 1):
            if bucket < len(self._exchanges):
                copy_blocks(packs[bucket], self._backend)
                works[bucket] = self._start(bucket)
            if bucket == 0:
                # The rank's own shards are copied while the first bucket travels.
                copy_blocks(own, self._backend)
            else:
                for work in works.pop(bucket - 1):
                    work.wait()
                copy_blocks(unpacks[bucket - 1], self._backend)
        if not self.keep:
            self._staging.release()
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """The generation shards as of the last `gather`."""
        names = {self.plan.specs[i].name for i in self._unchanged}
        return {
            spec.name: self._weights[spec.name]
            if spec.name in names
            else self._generation.tensors[spec.name]
            for spec in self.plan.specs
            if spec.name in names or spec.name in self._generation.tensors
        }

    def release(self) -> None:
        """End of generation: give the memory back unless it is kept."""
        if not self.keep:
            self._generation.release()
            self._staging.release()  # held since the constructor when nothing was gathered yet

    def _start(self, bucket: int) -> list[dist.Work]:
        send, receive = self._slot(bucket)
        return start_exchange(self._exchanges[bucket], send, receive, self._group, self.traffic)

    def _slot(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        slot = bucket % SLOTS
        return self._staging.tensors[f"send{slot}"], self._staging.tensors[f"receive{slot}"]

    def _build_tables(self) -> list[CopyTable]:
        """[own shards, pack 0, unpack 0, pack 1, unpack 1, ...]"""
        tables = [CopyTable(list(self._own_copies()))]
        for bucket, exchange in enumerate(self._exchanges):
            send, receive = self._slot(bucket)
            tables.append(CopyTable([
                pack_copy(self._training(t), send, t, at)
                for payload in exchange.distinct_sends()
                for t, at in payload.positions()
            ]))  # fmt: skip
            tables.append(CopyTable([
                unpack_copy(receive, self._target(t), t, at)
                for payload in exchange.receives.values()
                for t, at in payload.positions()
            ]))  # fmt: skip
        return tables

    def _own_copies(self) -> Iterable[BlockCopy]:
        for t in self.plan.local(self.rank):
            if t.tensor not in self._unchanged:
                b = t.block
                yield BlockCopy(
                    self._training(t), self._target(t), b.src_offset, b.dst_offset,
                    b.rows, b.row_bytes, b.src_stride, b.dst_stride,
                )  # fmt: skip

    def _training(self, transfer: Transfer) -> torch.Tensor:
        return self._weights[self.plan.specs[transfer.tensor].name]

    def _target(self, transfer: Transfer) -> torch.Tensor:
        return self._generation.tensors[self.plan.specs[transfer.tensor].name]
