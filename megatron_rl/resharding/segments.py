"""Generation weights as the training shards they are made of: nothing copied, nothing unpacked.

A generation shard of a nested grid is a row of whole training shards: the rank's own, which is
used in place in training memory, and its neighbours', which are used where they were received. The
memory beyond the training weights is then exactly what was received, M/(t_g·p_g) - M/(t·p), and a
gather has no unpacking to do. The price is one smaller GEMM per shard instead of one large one:

  column-parallel (linear_qkv, linear_fc1)   y = [x W_1ᵀ, x W_2ᵀ, ...]; for a gated MLP the gate
                                             halves come first, then the up halves
  row-parallel (linear_proj, linear_fc2)     y = Σ_s x_s W_sᵀ with x cut as the shards are
  embedding                                  the shard that has the row gives it

With KV heads copied in only one of the two layouts a shard is not made of whole shards, and the
segmented form is refused; so is a bucket so small that a shard would arrive in pieces.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from megatron_rl.kernels.reshard import CopyTable, copy_blocks
from megatron_rl.resharding.arena import Arena
from megatron_rl.resharding.exchange import pack_copy, start_exchange
from megatron_rl.resharding.execute import PlannedExchange
from megatron_rl.resharding.plan import Plan

Segments = tuple[torch.Tensor, ...]


class SegmentedResharder(PlannedExchange):
    """Gathers generation weights as segments; arguments as `execute.PlannedExchange`.

    Raises:
        ValueError: also for tensors whose generation shard is not made of whole training shards.
    """

    collective = False

    def __init__(self, plan: Plan, rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, rank, *args, **kwargs)
        parts = [f"receive{b}" for b in range(len(self._exchanges))]
        self._received = Arena(
            {
                name: ((exchange.receive_bytes,), torch.uint8)
                for name, exchange in zip(parts, self._exchanges, strict=True)
            },
            self._device,
        )
        # Every payload is packed before the first is sent: one launch, and the sends overlap.
        self._sent = Arena(
            {f"send{b}": ((e.send_bytes,), torch.uint8) for b, e in enumerate(self._exchanges)},
            self._device,
        )
        self._segments = self._arrange()
        self._table: CopyTable | None = None

    @property
    def extra_bytes(self) -> int:
        """Bytes beyond the training weights, held at this moment; staging apart."""
        return self._received.held_bytes

    @torch.no_grad()
    def gather(self) -> dict[str, Segments]:
        """Bring the segments up to date with the training weights.

        Returns:
            For every tensor of the generation shard its segments, in generation order. Read-only:
            the rank's own segment is the training tensor itself.
        """
        self._received.allocate()
        self._sent.allocate()
        if self._table is None or self._table.stale():
            self._table = CopyTable([
                pack_copy(self._weights[self.plan.specs[t.tensor].name], sent, t, at)
                for sent, exchange in zip(self._sent.tensors.values(), self._exchanges, strict=True)
                for payload in exchange.distinct_sends()
                for t, at in payload.positions()
            ])  # fmt: skip
        copy_blocks(self._table, self._backend)
        works = [
            work
            for bucket, exchange in enumerate(self._exchanges)
            for work in start_exchange(
                exchange,
                self._sent.tensors[f"send{bucket}"],
                self._received.tensors[f"receive{bucket}"],
                self._group,
                self.traffic,
            )
        ]
        for work in works:
            work.wait()
        self._sent.release()
        return self._segments

    def release(self) -> None:
        """End of generation: give the memory back unless it is kept."""
        if not self.keep:
            self._received.release()

    def _arrange(self) -> dict[str, Segments]:
        plan, rank = self.plan, self.rank
        arrived = self._arrived()
        found = {}
        for index, spec in enumerate(plan.specs):
            shape = plan.generation_shape(rank, index)
            if shape is None:
                continue
            pieces = {src: piece for (tensor, src), piece in arrived.items() if tensor == index}
            if any(t.tensor == index for t in plan.local(rank)):
                pieces[rank] = self._weights[spec.name]
            # Shards follow one another as their ranks stand on the tensor axis.
            order = sorted(pieces, key=lambda src: plan.train.axes(src)[0])
            found[spec.name] = tuple(pieces[src] for src in order)
            if sum(p.numel() for p in found[spec.name]) != prod(shape):
                raise ValueError(
                    f"{spec.name}: the generation shard of rank {rank} is not made of whole "
                    "training shards; use Resharder, or one replicate_kv for both layouts"
                )
        return found

    def _arrived(self) -> dict[tuple[int, int], torch.Tensor]:
        """Received training shards by (tensor, source rank), as views of what was received."""
        plan = self.plan
        runs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for bucket, exchange in enumerate(self._exchanges):
            for src, payload in exchange.receives.items():
                for t, at in payload.positions():
                    runs.setdefault((t.tensor, src), []).append((bucket, at, t.block.nbytes))
        shards = {}
        for (tensor, src), pieces in runs.items():
            spec, shape = plan.specs[tensor], plan.training_shape(src, tensor)
            bucket, start, _ = pieces[0]
            total = sum(size for _, _, size in pieces)
            joined = all(
                a[0] == b[0] and a[1] + a[2] == b[1]
                for a, b in zip(pieces, pieces[1:], strict=False)
            )
            if not joined or total != prod(shape) * spec.element_bytes:
                raise ValueError(
                    f"{spec.name}: the shard of rank {src} does not arrive in one piece; give a "
                    "bucket_bytes of at least its received bytes, or use Resharder"
                )
            flat = self._received.tensors[f"receive{bucket}"][start : start + total]
            shards[tensor, src] = flat.view(getattr(torch, spec.dtype)).view(shape)
        return shards


def column_linear(
    x_TI: torch.Tensor, weights: Segments, biases: Segments | None = None, *, gated: bool = False
) -> torch.Tensor:
    """Column-parallel layer over segments (O_s, I): output (T, O) in generation order.

    Args:
        x_TI: input.
        weights: segments of the weight.
        biases: segments of the bias (O_s,), cut alike; None without one.
        gated: every segment is [gate; up], and the output is [all gates; all ups].
    """
    pieces = [
        functional.linear(x_TI, w, None if biases is None else biases[i])
        for i, w in enumerate(weights)
    ]
    if gated:
        halves = [piece.chunk(2, dim=-1) for piece in pieces]
        pieces = [gate for gate, _ in halves] + [up for _, up in halves]
    return torch.cat(pieces, dim=-1)


def row_linear(x_TI: torch.Tensor, weights: Segments) -> torch.Tensor:
    """Row-parallel layer over segments (O, I_s): output (T, O), the sum over this rank's shards."""
    parts = x_TI.split([w.shape[1] for w in weights], dim=-1)
    out = functional.linear(parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out = out + functional.linear(part, weight)
    return out


def embedding_lookup(ids_T: torch.Tensor, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows (T, O) of a table given as row segments; ids count from the first segment's row 0."""
    out = torch.empty(
        *ids_T.shape, tables[0].shape[1], dtype=tables[0].dtype, device=tables[0].device
    )
    first = 0
    for table in tables:
        inside = (ids_T >= first) & (ids_T < first + table.shape[0])
        rows = functional.embedding(torch.where(inside, ids_T - first, 0), table)
        out = torch.where(inside[..., None], rows, out)
        first += table.shape[0]
    return out
