"""What one gradient message set covers: some buckets, their exempt parts and their residuals.

Shape suffixes: N ranks, S values of a shard, M nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_rl.comm.hierarchy import NodeGroups, spread_inside, sum_inside
from megatron_rl.comm.two_shot import Rules, Segment, TwoShot, shard_length


@dataclass(slots=True)
class BucketPlan:
    """How one bucket's flat gradient travels.

    Attributes:
        grad: the bucket's gradient, 1-D.
        shard: S; the first N·S values are quantised, none when 0.
        whole: views into ``grad`` that travel in full precision.
    """

    grad: torch.Tensor
    shard: int
    whole: list[torch.Tensor] = field(default_factory=list)


def plan_bucket(
    grad: torch.Tensor,
    exempt: list[tuple[int, int]],
    *,
    ranks: int,
    block: int,
    sharded: bool,
    min_values: int,
) -> BucketPlan:
    """Decide what of a bucket is quantised.

    Args:
        grad: the bucket's flat gradient.
        exempt: [first, last) ranges that must not be quantised.
        ranks: N.
        block: values per scale.
        sharded: True when rank n owns the n-th of N equal parts (distributed optimizer). Otherwise
            shards are made of whole blocks and the few values left over stay in full precision.
        min_values: smaller buckets travel whole.
    """
    numel = grad.numel()
    shard = numel // ranks if sharded else shard_length(numel, ranks, block)
    if numel < min_values or shard == 0:
        return BucketPlan(grad, 0, [grad])
    ranges = [*exempt, (ranks * shard, numel)]
    return BucketPlan(grad, shard, [grad[first:last] for first, last in ranges if last > first])


class SyncUnit:
    """Buckets whose gradients are reduced together; reused every step.

    Args:
        plans: the buckets, in an order equal on all ranks.
        group: all data parallel ranks.
        rules: kernels and options; its group is the one that int8 crosses (between nodes when
            ``nodes`` is given, otherwise ``group``).
        nodes: groups of a two-level reduction, or None.
        residual_dtype: fp32 or bf16 to keep error feedback, None for none.
        index: distinguishes the units of a model, for stochastic rounding.
    """

    def __init__(
        self, plans: list[BucketPlan], group: dist.ProcessGroup, rules: Rules, *,
        nodes: NodeGroups | None = None, residual_dtype: torch.dtype | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        self.plans, self.group, self.rules, self.nodes = plans, group, rules, nodes
        self.steps, self._index = 0, index
        self.bytes_sent = 0
        self._nonfinite: list[torch.Tensor] = []
        self._finish: Callable[[], None] | None = None
        device = plans[0].grad.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.residuals = [self._new_residuals(plan, residual_dtype) for plan in plans]

    def _new_residuals(
        self, plan: BucketPlan, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if dtype is None or plan.shard == 0:
            return None, None
        rows = self.rules.group.size()
        sent_NS = torch.zeros(rows, plan.shard, dtype=dtype, device=plan.grad.device)
        owned_S = torch.zeros_like(sent_NS[0]) if self.rules.gather else None
        return sent_NS, owned_S

    def forget_residuals(self) -> None:
        """Zero the error feedback."""
        for pair in self.residuals:
            for residual in pair:
                if residual is not None:
                    residual.zero_()

    def take_nonfinite(self) -> int:
        """Blocks with an inf or NaN that this rank met since the last call (waits for them)."""
        count = sum(int(blocks) for blocks in self._nonfinite)
        self._nonfinite.clear()
        return count

    def launch(self) -> None:
        """Start reducing all buckets. Gradients may not be touched until `wait` returns."""
        assert self._finish is None, "the previous reduction has not been waited for"
        with self._side_stream():
            finish = self._begin()
            if self._stream is not None:
                # The host never waits for the GPU, so shot 2 is queued behind shot 1 right away.
                finish()
                finish = lambda: torch.cuda.current_stream().wait_stream(self._stream)  # noqa: E731
        self._finish = finish

    def wait(self) -> None:
        """Complete the reduction; nothing happens when none is in flight."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _begin(self) -> Callable[[], None]:
        whole = [view for plan in self.plans for view in plan.whole]
        exact, exact_work = self._send_whole(whole)
        segments, spreads = self._segments()
        shots = TwoShot(segments, self.rules, self.steps * 65536 + self._index)
        shots.launch()
        self.steps += 1
        self.bytes_sent += shots.bytes_sent
        if shots.nonfinite_blocks is not None:
            self._nonfinite.append(shots.nonfinite_blocks)

        def finish() -> None:
            shots.finish()
            for spread in spreads:
                spread()
            if exact_work is not None:
                exact_work.wait()
                exact.mul_(self.rules.factor)
                parts = exact.split([view.numel() for view in whole])
                torch._foreach_copy_(whole, list(parts))

        return finish

    def _send_whole(
        self, whole: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, dist.Work | None]:
        """Put the exempt values on the wire and zeros in their place: a large bias beside a small
        weight must not coarsen the weight's block."""
        if not whole:
            return None, None
        exact = torch.cat([view.to(torch.float32) for view in whole])
        torch._foreach_zero_(whole)
        ranks = self.group.size()
        self.bytes_sent += 2 * (ranks - 1) * exact.numel() * 4 // ranks
        return exact, dist.all_reduce(exact, group=self.group, async_op=True)

    def _segments(self) -> tuple[list[Segment], list[Callable[[], None]]]:
        segments, spreads = [], []
        for plan, (sent_NS, owned_S) in zip(self.plans, self.residuals, strict=True):
            if plan.shard == 0:
                continue
            ranks = self.group.size()
            grad_NS = plan.grad[: ranks * plan.shard].view(ranks, plan.shard)
            segment = Segment(grad_NS, sent_NS, owned_S)
            if self.nodes is not None:
                summed_MS = sum_inside(grad_NS, self.nodes)
                segment = replace(segment, grad_NS=summed_MS)
                spreads.append(
                    lambda s=summed_MS, g=grad_NS: spread_inside(
                        s, g, self.nodes, self.rules.gather
                    )
                )
            segments.append(segment)
        return segments, spreads
