"""One stretch of generation: requests come in, tokens come out, the cache lives as long as it.

Every rank of a replica holds the same session and calls it in the same order with the same
arguments; what the replicas do is independent.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from megatron_rl.generation.blocks import Blocks
from megatron_rl.generation.cache import CacheShape, KVCache
from megatron_rl.generation.runner import Launched, Runner
from megatron_rl.generation.scheduler import Scheduler, Step
from megatron_rl.generation.sequence import Response, Sequence
from megatron_rl.generation.sequence_parallel import sequence_parallel_off
from megatron_rl.models.gpt import ParallelModel


@dataclass(kw_only=True, slots=True)
class SessionCounts:
    """What a session did.

    Attributes:
        steps: forward passes with a plan of the host's (a burst of decode passes is one).
        computed_tokens: tokens that went through the model.
        shared_blocks: blocks used again instead of being computed.
        preemptions: sequences that gave their blocks back.
        cache_blocks: blocks of the KV cache.
        busy_slots, slot_steps: pipeline occupancy: slots with work, out of all, summed over steps.
        capture_seconds: spent on capturing CUDA graphs.
    """

    steps: int = 0
    computed_tokens: int = 0
    shared_blocks: int = 0
    preemptions: int = 0
    cache_blocks: int = 0
    busy_slots: int = 0
    slot_steps: int = 0
    capture_seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of pipeline slots that had work."""
        return self.busy_slots / max(self.slot_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """See EngineSettings, where these come from."""

    max_batch_tokens: int
    max_running: int
    share_prefixes: bool
    burst: int
    steps_ahead: int
    cuda_graphs: bool
    keep_routes: bool


class Session:
    """Continuous batching over one KV cache; a context manager that frees it.

    Under pipeline parallelism as many micro-batches as there are stages are in flight: while this
    stage works on one, the next stage works on the one before, and a micro-batch's next step waits
    for nothing but its own tokens. Without a pipeline `steps_ahead` further steps are launched
    before the tokens of the first are looked at, so that the device does not wait for the host.
    """

    def __init__(
        self, model: ParallelModel, limits: SessionLimits, *, blocks: int, block_size: int
    ) -> None:
        layout = model.groups.layout
        shape = CacheShape.of(
            model, blocks=blocks, block_size=block_size, keep_routes=limits.keep_routes
        )
        self.model = model
        self.blocks = Blocks(blocks, block_size, share_prefixes=limits.share_prefixes)
        # With virtual stages a step passes every rank several times: one at a time.
        self.slots = layout.pp if layout.vpp == 1 else 1
        self.scheduler = Scheduler(
            self.blocks, max_batch_tokens=limits.max_batch_tokens, max_running=limits.max_running,
            slots=self.slots, window=model.config.window,
            burst=limits.burst if layout.pp == 1 else 1,
        )  # fmt: skip
        self.runner = Runner(
            model, KVCache(shape, model.device), burst=limits.burst,
            cuda_graphs=limits.cuda_graphs,
        )  # fmt: skip
        # Steps in flight when a step returns, its own one included.
        self._depth = self.slots if layout.pp > 1 else 1 + limits.steps_ahead
        self.counts = SessionCounts(cache_blocks=blocks)
        self._in_flight: deque[Launched | None] = deque()
        self._aborted: set[int] = set()
        self._next_slot = 0
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        self._exit.enter_context(sequence_parallel_off(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._exit.close()
        self.runner = None  # its cache and graphs go with it

    @property
    def finished(self) -> bool:
        return self.scheduler.finished and not any(self._in_flight)

    @property
    def room(self) -> int:
        """Sequences that could start at once."""
        return max(self.scheduler.max_running - self.scheduler.load, 0)

    def add(self, sequence: Sequence, copies: list[Sequence] | None = None) -> None:
        """A checked request; `copies` are further samples of its prompt, computed once."""
        sequence.followers = list(copies or [])
        self.scheduler.add(sequence)

    def abort(self, request: int) -> None:
        """Ends a request with what it has; its response comes with the next `step`."""
        self._aborted.add(request)

    def step(self) -> tuple[list[Sequence], list[Response]]:
        """Launches what may be launched and takes the tokens of the oldest step in flight.

        Returns:
            The sequences that got tokens, and the responses that are complete.
        """
        responses = self._remove_aborted()
        # One that is to be aborted leaves when no step with it is in flight any more.
        waits = self.slots == 1 and bool(self._aborted)
        while len(self._in_flight) < self._depth and not (waits and self._in_flight):
            plan = self.scheduler.next_step(self._next_slot)
            if plan is None and self.slots == 1:
                break
            self._in_flight.append(self._launch(plan))
            self._next_slot = (self._next_slot + 1) % self.slots
        if not self._in_flight:
            return [], responses
        advanced, finished = self._take(self._in_flight.popleft())
        return advanced, responses + [s.response() for s in finished]

    def _launch(self, plan: Step | None) -> Launched | None:
        self.counts.slot_steps += 1
        if plan is None:
            return None
        launched = self.runner.launch(plan)
        self.scheduler.launched(plan)
        self.counts.busy_slots += 1
        self.counts.steps += 1
        self.counts.computed_tokens += sum(plan.new_tokens) * max(plan.decodes, 1)
        return launched

    def _take(self, launched: Launched | None) -> tuple[list[Sequence], list[Sequence]]:
        if launched is None:
            return [], []
        step = launched.step
        tokens_BK, kept_BK, full_BK = launched.take()
        for i, (sequence, _) in enumerate(step.draws):
            if sequence.finish_reason is None:
                sequence.extend(tokens_BK[i], kept_BK[i], full_BK[i])
                if sequence.finish_reason is not None and self.runner.cache.routes is not None:
                    sequence.routes = self.runner.routes_of(sequence)  # before its blocks are freed
        finished = self.scheduler.complete(step)
        counts, loop = self.counts, self.runner.decode_loop
        counts.shared_blocks = self.blocks.shared_blocks
        counts.preemptions = self.scheduler.preemptions
        counts.capture_seconds = loop.capture_seconds if loop else 0.0
        return [s for s, _ in step.draws], finished

    def _remove_aborted(self) -> list[Response]:
        if not self._aborted:
            return []
        flying = {s.request for f in self._in_flight if f for s in f.step.sequences}
        flying |= {s.request for f in self._in_flight if f for s, _ in f.step.draws}
        responses = []
        for request in sorted(self._aborted - flying):
            sequence = self.scheduler.remove(request)
            self._aborted.discard(request)
            if sequence is not None:
                responses.append(replace(sequence.response(), finish_reason="abort"))
        return responses
