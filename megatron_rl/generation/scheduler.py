"""Which sequences compute which tokens next: continuous batching over a fixed number of blocks.

Every rank of a replica runs the same scheduler on the same tokens and so takes the same decisions:
nothing about scheduling crosses the network.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megatron_rl.generation.blocks import Blocks
from megatron_rl.generation.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One forward pass: the sequences in it and how many new tokens each computes."""

    sequences: list[Sequence]
    new_tokens: list[int]


class Scheduler:
    """Admits, batches and preempts sequences.

    Prefill comes first: a finished sequence's place is refilled at once. Long prompts are computed
    in chunks of `max_batch_tokens`. When blocks run out, the sequence admitted last gives its
    blocks back and is computed again later; its tokens are kept.
    """

    def __init__(self, blocks: Blocks, *, max_batch_tokens: int, max_running: int) -> None:
        self.blocks = blocks
        self.max_batch_tokens, self.max_running = max_batch_tokens, max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def finished(self) -> bool:
        return not self.waiting and not self.running

    def next_step(self) -> Step:
        """The next forward pass: prefill chunks if any sequence has them, else one decode step."""
        return self._prefill_step() or self._decode_step()

    def complete(self, step: Step) -> list[Sequence]:
        """Accounts for a finished forward pass.

        Returns:
            Sequences whose last pending token was computed: each gets a new token.
        """
        for sequence, new in zip(step.sequences, step.new_tokens, strict=True):
            sequence.computed += new
        return [s for s in step.sequences if s.pending == 0]

    def retire(self) -> list[Sequence]:
        """Removes finished sequences and frees their blocks."""
        done = [s for s in self.running if s.finish_reason is not None]
        for sequence in done:
            self.blocks.release(sequence.table)
        self.running = [s for s in self.running if s.finish_reason is None]
        return done

    def _prefill_step(self) -> Step | None:
        budget = self.max_batch_tokens
        sequences, new_tokens = [], []
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                budget -= self._plan(sequence, budget, sequences, new_tokens)
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._plan(sequence, budget, sequences, new_tokens)
        return Step(sequences=sequences, new_tokens=new_tokens) if sequences else None

    def _plan(
        self, sequence: Sequence, budget: int, sequences: list[Sequence], new_tokens: list[int]
    ) -> int:
        new = min(sequence.pending, budget)
        sequences.append(sequence)
        new_tokens.append(new)
        self.blocks.publish(sequence.table, sequence.tokens, sequence.computed + new)
        return new

    def _admit(self, sequence: Sequence) -> bool:
        """Reserves blocks for the sequence's tokens and one more."""
        sequence.computed = self.blocks.match_prefix(sequence.table, sequence.tokens)
        if self.blocks.extend(sequence.table, len(sequence.tokens) + 1):
            return True
        self.blocks.release(sequence.table)
        sequence.computed = 0
        return False

    def _decode_step(self) -> Step:
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            while not self.blocks.extend(sequence.table, len(sequence.tokens)):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    break
            index += 1
        assert self.running, "the cache is too small for one sequence: checked when it was added"
        for sequence in self.running:
            self.blocks.publish(sequence.table, sequence.tokens, sequence.computed + 1)
        return Step(sequences=list(self.running), new_tokens=[1] * len(self.running))

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.table)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
