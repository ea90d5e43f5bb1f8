"""Generation in the training process, on the training shards.

`Engine.generate` is called by all ranks of a replica with the same prompts; what the replicas do is
independent. The weights are those of the model as it stands: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import psutil
import torch

from megatron_rl.generation.blocks import Blocks
from megatron_rl.generation.runner import Runner, cache_shape
from megatron_rl.generation.scheduler import Scheduler
from megatron_rl.generation.sequence import Response, SamplingParams, Sequence
from megatron_rl.generation.sequence_parallel import sequence_parallel_off
from megatron_rl.models.gpt import ParallelModel


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
    """

    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.8
    max_batch_tokens: int = 8192
    max_running: int = 256
    share_prefixes: bool = True


@dataclass(kw_only=True, slots=True)
class EngineCounts:
    """What one `generate` call did."""

    steps: int = 0
    computed_tokens: int = 0
    shared_blocks: int = 0
    preemptions: int = 0
    cache_blocks: int = 0


class Engine:
    """Continuous batching over a paged KV cache that exists only while generating."""

    def __init__(self, model: ParallelModel, settings: EngineSettings | None = None) -> None:
        assert model.head == "lm", f"the {model.role} has no vocabulary head"
        self.model, self.settings = model, settings or EngineSettings()
        self.counts = EngineCounts()

    def generate(
        self, prompts: List[List[int]], sampling: SamplingParams | List[SamplingParams], *,
        requests: List[int] | None = None,
    ) -> list[Response]:  # fmt: skip
        """Generates one response per prompt, in order.

        Args:
            prompts: token ids; the same on every rank of the replica.
            sampling: for all prompts, or one each.
            requests: numbers that key the sampling noise (default 0, 1, …); give each sample of a
                global batch its own, so that equal prompts on different replicas differ.

        Raises:
            ValueError: for an empty prompt, an id outside the vocabulary, a prompt that leaves no
                room in the context, or a cache that can't hold one sequence.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        numbers = range(len(prompts)) if requests is None else requests
        sequences = [
            self._sequence(number, list(prompt), params)
            for number, prompt, params in zip(numbers, prompts, each, strict=True)
        ]
        if not sequences:
            return []
        blocks = self._plan_blocks(sequences)
        scheduler = Scheduler(
            blocks, max_batch_tokens=self.settings.max_batch_tokens,
            max_running=self.settings.max_running,
        )  # fmt: skip
        for sequence in sequences:
            scheduler.add(sequence)
        shape = cache_shape(self.model, blocks=blocks.count, block_size=blocks.block_size)
        self.counts = EngineCounts(cache_blocks=blocks.count)
        with sequence_parallel_off(self.model):
            runner = Runner(self.model, shape)
            while not scheduler.finished:
                self._step(scheduler, runner)
        self.counts.shared_blocks = blocks.shared_blocks
        self.counts.preemptions = scheduler.preemptions
        return [s.response() for s in sequences]

    def _step(self, scheduler: Scheduler, runner: Runner) -> None:
        step = scheduler.next_step()
        tokens, logprobs, full = (x.tolist() for x in runner.run(step))
        for i, sequence in enumerate(scheduler.complete(step)):
            sequence.append(tokens[i], logprobs[i], full[i])
        scheduler.retire()
        self.counts.steps += 1
        self.counts.computed_tokens += sum(step.new_tokens)

    def _sequence(self, request: int, prompt: list[int], params: SamplingParams) -> Sequence:
        arch = self.model.arch
        if not prompt:
            raise ValueError(f"request {request}: the prompt is empty; give at least one token")
        bad = next((t for t in prompt if not 0 <= t < arch.vocab), None)
        if bad is not None:
            raise ValueError(
                f"request {request}: token id {bad} is outside the vocabulary of {arch.vocab}; "
                "the tokenizer does not belong to this model"
            )
        limits = (len(prompt) + params.max_new_tokens, params.max_length, arch.max_positions)
        limit = min(x for x in limits if x is not None)
        if limit <= len(prompt):
            raise ValueError(
                f"request {request}: the prompt has {len(prompt)} tokens and leaves no room in a "
                f"context of {min(limits[1] or limit, arch.max_positions)}; shorten it or raise "
                "rollout.max_length (at most the model's max_position_embeddings)"
            )
        return Sequence(
            request=request, prompt_length=len(prompt), tokens=prompt, sampling=params, limit=limit
        )

    def _plan_blocks(self, sequences: list[Sequence]) -> Blocks:
        """A cache within the budget, and no larger than the requests can fill."""
        settings = self.settings
        size = settings.block_size
        longest = max(-(-s.limit // size) for s in sequences)
        useful = sorted((-(-s.limit // size) for s in sequences), reverse=True)
        useful_blocks = sum(useful[: settings.max_running])
        per_block = cache_shape(self.model, blocks=1, block_size=size).bytes_per_block()
        budget = settings.kv_cache_bytes
        if budget is None:
            budget = int(_free_memory(self.model.device) * settings.kv_memory_fraction)
        blocks = min(useful_blocks, self._agree(budget // per_block))
        if blocks < longest:
            raise ValueError(
                f"rollout.kv_cache_gb: the KV cache has room for {blocks * size} tokens but one "
                f"sequence may need {longest * size} ({longest * per_block / 1e9:.3f} GB on this "
                "rank); raise rollout.kv_cache_gb, or lower rollout.max_new_tokens"
            )
        return Blocks(blocks, size, share_prefixes=settings.share_prefixes)

    def _agree(self, blocks: int) -> int:
        """The smallest number of blocks over the replica: all its schedulers must be alike."""
        group = self.model.groups.model
        count = torch.tensor([blocks], dtype=torch.int64, device=self.model.device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN, group=group)
        return int(count)


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on this rank's device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    ranks = max(torch.distributed.get_world_size(), 1)
    return psutil.virtual_memory().available // ranks
