"""Generation in the training process, on the training shards.

`Engine.generate` is called by all ranks of a replica with the same prompts; what the replicas do is
independent. The weights are those of the model as it stands: nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron_rl.generation.cache import CacheShape, free_memory
from megatron_rl.generation.requests import make_sequence, refusal
from megatron_rl.generation.sequence import Response, SamplingParams, Sequence
from megatron_rl.generation.session import Session, SessionCounts, SessionLimits
from megatron_rl.models.gpt import ParallelModel

log = logging.getLogger("megatron_rl")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Limits of an engine.

    Attributes:
        block_size: tokens per block of the KV cache.
        kv_cache_bytes: memory of the cache on this rank; None: `kv_memory_fraction` of what is
            free. Never more is taken than the requests at hand can use.
        max_batch_tokens: tokens of one prefill pass.
        max_running: sequences that decode at the same time.
        share_prefixes: sequences with equal beginnings share cache blocks.
        burst: most decode passes before the host looks at the tokens; None: 8 on CUDA, else 1. A
            sequence that ends within a burst computes a few tokens for nothing; the results do not
            change.
        steps_ahead: steps launched before the host looks at the tokens of the one before; None: 1
            on CUDA, else 0. Without a pipeline only.
        cuda_graphs: capture decode passes on CUDA.
        keep_routes: responses say which experts their tokens took (mixture of experts).
    """

    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.8
    max_batch_tokens: int = 8192
    max_running: int = 256
    share_prefixes: bool = True
    burst: int | None = None
    steps_ahead: int | None = None
    cuda_graphs: bool = True
    keep_routes: bool = False


class Engine:
    """Continuous batching over a paged KV cache that exists only while generating.

    Args:
        decode: ids → text; needed for stop texts.

    Attributes:
        counts: what the last session did.
        after_step: called by `generate` and `serve` on every rank of the engine's replica after
            each step of the session; what it raises ends the generation.
        on_responses: called there, too, with the responses that a step has completed.
    """

    def __init__(
        self, model: ParallelModel, settings: EngineSettings | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:  # fmt: skip
        assert model.head == "lm", f"the {model.role} has no vocabulary head"
        self.model, self.settings = model, settings or EngineSettings()
        self.decode = decode
        self.counts = SessionCounts()
        self.after_step: Callable[[], None] | None = None
        self.on_responses: Callable[[list[Response]], None] | None = None

    def generate(
        self, prompts: List[List[int]], sampling: SamplingParams | List[SamplingParams], *,
        n: int = 1, requests: List[int] | None = None, on_error: str = "raise",
    ) -> list[Response]:  # fmt: skip
        """Generates `n` responses per prompt, in order.

        Args:
            prompts: token ids; the same on every rank of the replica.
            sampling: for all prompts, or one each.
            n: samples per prompt. Samples of one prompt, also where it is given several times in
                a row, are computed from one prefill and share its blocks.
            requests: numbers that key the sampling noise, one per response (default 0, 1, …); give
                each sample of a global batch its own, so that equal prompts on different replicas
                differ.
            on_error: "raise", or "return": a request that can't be served gets a response with
                finish_reason "error", and the others go on.

        Raises:
            ValueError: for an empty prompt, an id outside the vocabulary, a prompt that leaves no
                room in the context, or a cache that can't hold one sequence.
        """
        if n < 1:
            raise ValueError(f"n is {n}: it must be at least 1 response per prompt")
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        numbers = list(range(len(prompts) * n) if requests is None else requests)
        done: dict[int, Response] = {}
        budget = self._budget_blocks()
        sequences: list[Sequence] = []
        for i, number in enumerate(numbers):
            prompt, params = prompts[i // n], each[i // n]
            try:
                made = make_sequence(number, list(prompt), params, self.model, self.decode)
                self._check_fits(made, budget)
                sequences.append(made)
            except ValueError as error:
                if on_error == "raise":
                    raise
                done[number] = refusal(number, prompt, error)
        if sequences:
            with self._session(sequences, budget) as session:
                self._add(session, sequences)
                while not session.finished:
                    done |= self._step(session)
        self._log_counts()
        return [done[number] for number in numbers]

    def serve(
        self, prompts: List[List[int]], sampling: SamplingParams, *, requests: List[List[int]],
        take: Callable[..., list[int] | None],
    ) -> dict[int, list[Response]]:  # fmt: skip
        """Generates for some of the prompts, which are taken one by one as there is room.

        Args:
            prompts: all that may be asked for.
            requests: for each prompt, the numbers of its samples (see `generate`).
            take: `take(room, idle=…)` gives the next prompts' indices, None when there are no more
                (see `rollout.work_list`). The replica's ranks call it at the same steps.

        Returns:
            The responses of each prompt that was taken.
        """
        budget = self._budget_blocks()
        made = [
            [make_sequence(r, list(prompt), sampling, self.model, self.decode) for r in numbers]
            for prompt, numbers in zip(prompts, requests, strict=True)
        ]
        for samples in made:
            self._check_fits(samples[0], budget)
        done: dict[int, Response] = {}
        mine: list[int] = []
        more = True
        with self._session([s for samples in made for s in samples], budget) as session:
            while more or not session.finished:
                if more:
                    taken = take(session.room, idle=session.finished)
                    more = taken is not None
                    for index in taken or []:
                        mine.append(index)
                        self._add(session, made[index])
                done |= self._step(session)
        self._log_counts()
        return {index: [done[number] for number in requests[index]] for index in mine}

    def _add(self, session: Session, sequences: list[Sequence]) -> None:
        """Neighbours with equal prompts and parameters fork from one prefill."""
        if not self.settings.share_prefixes:
            for sequence in sequences:
                session.add(sequence)
            return
        for _, run in groupby(sequences, key=lambda s: (s.tokens, s.sampling)):
            first, *others = run
            session.add(first, others)

    def _step(self, session: Session) -> dict[int, Response]:
        """One step; the responses that it completes, by request."""
        _, responses = session.step()
        if self.on_responses is not None and responses:
            self.on_responses(list(responses))
        if self.after_step is not None:
            self.after_step()
        return {r.request: r for r in responses}

    def stream(
        self, prompt: List[int], sampling: SamplingParams, request: int = 0
    ) -> Iterator[int]:
        """Yields the tokens of one response as they come."""
        sequence = make_sequence(request, list(prompt), sampling, self.model, self.decode)
        budget = self._budget_blocks()
        self._check_fits(sequence, budget)
        with self._session([sequence], budget) as session:
            session.add(sequence)
            given = sequence.prompt_length
            while not session.finished:
                session.step()
                yield from sequence.tokens[given:]
                given = len(sequence.tokens)

    def open(self) -> Session:
        """A session for requests that are not known yet: its cache takes the whole budget."""
        return self._open(self._budget_blocks())

    def request(
        self, session: Session, number: int, prompt: List[int], sampling: SamplingParams
    ) -> Sequence:
        """Adds a request to a session.

        Raises:
            ValueError: see `generate`; the session and its other requests go on.
        """
        sequence = make_sequence(number, list(prompt), sampling, self.model, self.decode)
        self._check_fits(sequence, session.blocks.count)
        session.add(sequence)
        return sequence

    def _session(self, sequences: list[Sequence], budget: int) -> Session:
        """A session whose cache is no larger than the sequences can fill."""
        needs = sorted((self._blocks_of(s) for s in sequences), reverse=True)
        return self._open(min(sum(needs[: self.settings.max_running]), budget))

    def _open(self, blocks: int) -> Session:
        settings = self.settings
        limits = SessionLimits(
            max_batch_tokens=settings.max_batch_tokens, max_running=settings.max_running,
            share_prefixes=settings.share_prefixes, burst=self.burst,
            steps_ahead=self._on_device(settings.steps_ahead, 1, 0),
            cuda_graphs=settings.cuda_graphs, keep_routes=settings.keep_routes,
        )  # fmt: skip
        session = Session(self.model, limits, blocks=blocks, block_size=settings.block_size)
        self.counts = session.counts
        return session

    def _log_counts(self) -> None:
        counts = self.counts
        log.info(
            "generation: %d steps, %d tokens computed, %d blocks of %d shared, %d preemptions, "
            "pipeline occupancy %.2f, %.2f s of graph capture", counts.steps,
            counts.computed_tokens, counts.shared_blocks, counts.cache_blocks, counts.preemptions,
            counts.occupancy, counts.capture_seconds,
        )  # fmt: skip

    @property
    def burst(self) -> int:
        """Most decode passes of a step."""
        return self._on_device(self.settings.burst, 8, 1)

    def _on_device(self, setting: int | None, cuda: int, cpu: int) -> int:
        default = cuda if self.model.device.type == "cuda" else cpu
        return default if setting is None else setting

    def _blocks_of(self, sequence: Sequence) -> int:
        """Blocks that one sequence may need at a time."""
        size, window = self.settings.block_size, self.model.config.window
        tokens = sequence.limit
        if window is not None:
            chunk = min(self.settings.max_batch_tokens, sequence.limit)
            ahead = 1 + self._on_device(self.settings.steps_ahead, 1, 0)
            tokens = min(tokens, window + chunk + ahead * self.burst + size)
        return -(-tokens // size)

    def _check_fits(self, sequence: Sequence, blocks: int) -> None:
        needed = self._blocks_of(sequence)
        if blocks < needed:
            size = self.settings.block_size
            per_block = self._bytes_per_block()
            raise ValueError(
                f"rollout.kv_cache_gb: the KV cache has room for {blocks * size} tokens but one "
                f"sequence may need {needed * size} ({needed * per_block / 1e9:.3f} GB on this "
                "rank); raise rollout.kv_cache_gb, or lower rollout.max_new_tokens"
            )

    def _bytes_per_block(self) -> int:
        settings = self.settings
        return CacheShape.of(
            self.model, blocks=1, block_size=settings.block_size, keep_routes=settings.keep_routes
        ).bytes_per_block()

    def _budget_blocks(self) -> int:
        """Blocks within the memory budget: the smallest number over the replica, because all its
        schedulers must be alike."""
        settings = self.settings
        budget = settings.kv_cache_bytes
        if budget is None:
            budget = int(free_memory(self.model.device) * settings.kv_memory_fraction)
        count = torch.tensor([budget // self._bytes_per_block()], device=self.model.device)
        group = self.model.groups.model
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN, group=group)
        return int(count)
