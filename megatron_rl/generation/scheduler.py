"""Which sequences compute which tokens next: continuous batching over a fixed number of blocks.

Every rank of a replica runs the same scheduler on the same tokens and so takes the same decisions:
nothing about scheduling crosses the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.generation.blocks import Blocks
from megatron_rl.generation.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One forward pass.

    Attributes:
        sequences, new_tokens: who is in it, and how many new tokens each computes.
        draws: who gets a new token, with the index in `sequences` whose last logits it is drawn
            from; the samples of one prompt are drawn from the same ones.
        copies: blocks to copy before the pass, (from, to).
        decodes: decode passes in a row without the host (each sequence has one new token).
    """

    sequences: list[Sequence]
    new_tokens: list[int]
    draws: list[tuple[Sequence, int]]
    copies: list[tuple[int, int]] = field(default_factory=list)
    decodes: int = 0


class Scheduler:
    """Admits, batches and preempts sequences.

    Prefill comes first: a finished sequence's place is refilled at once. Long prompts are computed
    in chunks of `max_batch_tokens`. When blocks run out, the sequence admitted last gives its
    blocks back and is computed again later; its tokens are kept.

    With several `slots` (micro-batches of a pipeline) each plans for its own sequences while those
    of the others are in flight and left alone. A slot may also plan further while its own step is
    in flight, as long as no decision hangs on tokens that are not known yet: a sequence that turns
    out to have ended computes a few tokens for nothing.

    Args:
        window: tokens that attention sees; blocks before it are given back. None: all.
        burst: most decode passes in a row without the host.
    """

    def __init__(
        self, blocks: Blocks, *, max_batch_tokens: int, max_running: int, slots: int = 1,
        window: int | None = None, burst: int = 1,
    ) -> None:  # fmt: skip
        self.blocks, self.window, self.burst = blocks, window, burst
        self.max_batch_tokens, self.max_running, self.slots = max_batch_tokens, max_running, slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[list[Sequence]] = [[] for _ in range(slots)]
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """A request; its followers come with it."""
        self.waiting.append(sequence)

    def remove(self, request: int) -> Sequence | None:
        """Takes a request out wherever it is (not while a step with it is in flight)."""
        for queue in (self.waiting, *self.running):
            for sequence in queue:
                for follower in sequence.followers:
                    if follower.request == request:
                        sequence.followers.remove(follower)
                        return follower
                if sequence.request == request:
                    queue.remove(sequence)
                    self.blocks.release(sequence.table)
                    self._disband(sequence)
                    return sequence
        return None

    @property
    def finished(self) -> bool:
        return not self.waiting and not any(self.running)

    @property
    def load(self) -> int:
        """Responses that are asked for and not finished."""
        return sum(_load(queue) for queue in (self.waiting, *self.running))

    def next_step(self, slot: int = 0) -> Step | None:
        """The slot's next forward pass: prefill chunks if there are any, else decode.

        Returns:
            None when the slot has nothing to do before the steps in flight are done.
        """
        if self._must_wait(self.running[slot]):
            return None
        return self._prefill_step(slot) or self._decode_step(slot)

    def launched(self, step: Step) -> None:
        """Accounts for a step on its way: what it computes, and who has forked."""
        passes = max(step.decodes, 1)
        for sequence, new in zip(step.sequences, step.new_tokens, strict=True):
            sequence.computed += new + passes - 1
        for sequence, row in step.draws:
            leader = step.sequences[row]
            if sequence is not leader:
                sequence.table = self.blocks.fork(leader.table)
                sequence.computed, sequence.slot = leader.computed, leader.slot
                leader.followers.remove(sequence)
                self.running[leader.slot].append(sequence)
        for sequence, row in step.draws:
            sequence.ahead += passes
            self._disband(step.sequences[row])

    def complete(self, step: Step) -> list[Sequence]:
        """Accounts for a finished step whose tokens were appended; frees what is not needed.

        A later step may still be in flight with a sequence that has ended here. What it writes
        for it comes before anything that is launched from now on, so the blocks are free.

        Returns:
            The sequences that have ended.
        """
        done = []
        for sequence, _ in step.draws:
            sequence.ahead -= max(step.decodes, 1)
            if sequence.finish_reason is not None and sequence in self.running[sequence.slot]:
                self.blocks.release(sequence.table)
                self.running[sequence.slot].remove(sequence)
                done.append(sequence)
        if self.window is not None:
            for sequence in step.sequences:
                self.blocks.drop_before(sequence.table, sequence.computed - self.window + 1)
        return done

    def _must_wait(self, running: list[Sequence]) -> bool:
        """Whether a decision hangs on tokens in flight: one of the host's own about a token, or
        whose blocks to take away."""
        if not any(s.ahead for s in running):
            return False
        return any(s.needs_host for s in running) or self.blocks.free < self._missing(running, 1)

    def _missing(self, running: list[Sequence], decodes: int) -> int:
        """Free blocks that the next step of these takes at most, copies of shared ones included."""
        blocks, wanted = self.blocks, 0
        for s in running:
            end = min(s.computed + min(s.pending, self.max_batch_tokens) + decodes - 1, s.limit)
            wanted += max(blocks.needed(end) - len(s.table.blocks), 0)
            last = (s.length - 1) // blocks.block_size
            wanted += last < len(s.table.blocks) and blocks.shared(s.table, last)
        return wanted

    def _prefill_step(self, slot: int) -> Step | None:
        running, budget = self.running[slot], self.max_batch_tokens
        planned: list[tuple[Sequence, int]] = []
        index = 0  # preemption takes from the end: those already planned stay
        while index < len(running) and budget > 0:
            sequence = running[index]
            if sequence.pending > 1:
                new = min(sequence.pending, budget)
                if self._reserve(sequence, sequence.computed + new, running):
                    budget -= self._plan(sequence, new, planned)
            index += 1
        while self.waiting and budget > 0 and self._has_place(slot, self.waiting[0]):
            sequence = self.waiting[0]
            if not self._admit(sequence, budget):
                break
            self.waiting.popleft()
            sequence.slot = slot
            running.append(sequence)
            budget -= self._plan(sequence, min(sequence.pending, budget), planned)
        return self._step(planned) if planned else None

    def _has_place(self, slot: int, sequence: Sequence) -> bool:
        """Whether a slot may take a request: up to an equal part of all that there is to do."""
        loads = [_load(queue) for queue in self.running]
        share = -(-(sum(loads) + _load(self.waiting)) // self.slots)
        within = sum(loads) + _load([sequence]) <= self.max_running or sum(loads) == 0
        return loads[slot] < share and within

    def _plan(self, sequence: Sequence, new: int, planned: list[tuple[Sequence, int]]) -> int:
        """Its full blocks are known from here on: the next sequence can share them."""
        planned.append((sequence, new))
        self.blocks.publish(sequence.table, sequence.tokens, sequence.computed + new)
        return new

    def _step(self, planned: list[tuple[Sequence, int]]) -> Step:
        """A prefill step; followers beyond `max_running` wait and are computed on their own."""
        room = self.max_running - sum(map(len, self.running))
        draws: list[tuple[Sequence, int]] = []
        for row, (sequence, new) in enumerate(planned):
            if new == sequence.pending:
                forks = sequence.followers[: max(room, 0)]
                room -= len(forks)
                draws += [(s, row) for s in (sequence, *forks)]
        return Step(
            sequences=[s for s, _ in planned], new_tokens=[n for _, n in planned], draws=draws
        )

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Takes known blocks and the first chunk's; only if all its tokens and one more fit."""
        if self.window is None or len(sequence.tokens) <= self.window:
            sequence.computed = self.blocks.match_prefix(sequence.table, sequence.tokens)
        first = min(sequence.pending, budget)
        span = len(sequence.tokens) + 1
        if self.window is not None:
            span = min(span, self.window + first + self.blocks.block_size)
        fits = self.blocks.needed(span) - len(sequence.table.blocks) <= self.blocks.free
        end = sequence.computed + first
        if fits and self.blocks.extend(sequence.table, end + (end == len(sequence.tokens))):
            return True
        self.blocks.release(sequence.table)
        sequence.computed = 0
        return False

    def _decode_step(self, slot: int) -> Step | None:
        running, copies = self.running[slot], []
        decodes = self._burst(running)
        index = 0
        while index < len(running):
            sequence = running[index]
            if sequence.length >= sequence.limit:
                index += 1
                continue
            end = min(sequence.length + decodes - 1, sequence.limit)
            if self._reserve(sequence, end, running):
                while (copy := self._own_last_block(sequence)) is None:
                    if self._preempt_youngest(running) is sequence:
                        break
                if copy is not None and copy[0] != copy[1]:
                    copies.append(copy)
            index += 1
        going_on = [s for s in running if s.length < s.limit]
        if not going_on:
            return None
        for sequence in going_on:
            self.blocks.publish(sequence.table, sequence.tokens, len(sequence.tokens))
        return Step(
            sequences=going_on, new_tokens=[1] * len(going_on), copies=copies,
            draws=[(s, row) for row, s in enumerate(going_on)], decodes=decodes,
        )  # fmt: skip

    def _burst(self, running: list[Sequence]) -> int:
        """Decode passes before the host looks again: no more than the longest response can have,
        and few enough that every sequence has its blocks."""
        if not running or self.burst == 1 or any(s.needs_host for s in running):
            return 1
        burst = max(min(self.burst, max(s.limit - s.length for s in running)), 1)
        while burst > 1 and self.blocks.free < self._missing(running, burst):
            burst //= 2
        return burst

    def _reserve(self, sequence: Sequence, tokens: int, running: list[Sequence]) -> bool:
        """Blocks for `tokens` tokens, from the youngest sequences if need be.

        Returns:
            False if the sequence itself had to give way.
        """
        while not self.blocks.extend(sequence.table, tokens):
            if self._preempt_youngest(running) is sequence:
                return False
        return True

    def _own_last_block(self, sequence: Sequence) -> tuple[int, int] | None:
        last = (sequence.length - 1) // self.blocks.block_size
        return self.blocks.make_own(sequence.table, last)

    def _preempt_youngest(self, running: list[Sequence]) -> Sequence:
        sequence = running.pop()
        self.blocks.release(sequence.table)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def _disband(self, leader: Sequence) -> None:
        """Followers that could not fork are requests of their own."""
        self.waiting.extendleft(reversed(leader.followers))
        leader.followers = []


def _load(queue: Iterable[Sequence]) -> int:
    """Responses that a queue's requests stand for."""
    return sum(1 + len(sequence.followers) for sequence in queue)
