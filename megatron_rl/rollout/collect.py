"""Generates a replica's share of a batch of prompts."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.generation.engine import EngineSettings
from megatron_rl.generation.sequence import SamplingParams
from megatron_rl.parallel import ParallelGroups
from megatron_rl.resharding.transition import Transition
from megatron_rl.rollout.batch import RolloutBatch, make_batch
from megatron_rl.rollout.prompts import Prompt
from megatron_rl.text import Tokenizer


def engine_settings(config: Config) -> EngineSettings:
    """The engine's limits from `rollout`."""
    rollout = config.rollout
    gigabytes = rollout.kv_cache_gb
    return EngineSettings(
        block_size=rollout.block_size, kv_memory_fraction=rollout.kv_memory_fraction,
        kv_cache_bytes=None if gigabytes is None else int(gigabytes * 1e9),
        max_batch_tokens=rollout.max_batch_tokens, max_running=rollout.max_running,
        share_prefixes=rollout.prefix_sharing, burst=rollout.decode_burst,
        cuda_graphs=rollout.cuda_graphs,
    )  # fmt: skip


def sampling_params(
    config: Config, tokenizer: Tokenizer, *, temperature: float, seed: int
) -> SamplingParams:
    """Sampling from `rollout`; the tokenizer's end tokens end a response, too."""
    rollout = config.rollout
    stop_ids = {*tokenizer.end_ids, *rollout.stop_token_ids}
    return SamplingParams(
        temperature=temperature, top_k=rollout.top_k, top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens, max_length=rollout.max_length,
        min_new_tokens=rollout.min_new_tokens, stop_token_ids=tuple(sorted(stop_ids)),
        stop=tuple(rollout.stop), seed=seed,
    )  # fmt: skip


def prompts_per_block(config: Config, dp: int) -> int | None:
    """Prompts that are spread over the replicas together: those of one mini-batch, or the whole
    batch (None) where a mini-batch has fewer prompts than there are replicas."""
    prompts = config.mini_batch_size // config.rollout.n
    return prompts if prompts >= dp else None


def replica_share(count: int, groups: ParallelGroups, block: int | None = None) -> list[int]:
    """Indices of a batch of `count` prompts that this replica works on.

    Every `block` consecutive prompts are spread over all replicas: with blocks of one mini-batch,
    an optimizer step sees the same samples for every data parallel size.
    """
    dp, rank, block = groups.layout.dp, groups.dp_rank, block or max(count, 1)
    share: list[int] = []
    for start in range(0, count, block):
        size = min(block, count - start)
        share += range(start + size * rank // dp, start + size * (rank + 1) // dp)
    return share


def collect(
    transition: Transition, tokenizer: Tokenizer, prompts: list[Prompt], *, n: int,
    sampling: SamplingParams, first_request: int, first_index: int = 0, block: int | None = None,
) -> RolloutBatch:  # fmt: skip
    """Generates `n` samples for each of this replica's prompts.

    Args:
        prompts: of the whole batch, the same on every rank.
        first_request: number of the batch's first sample in the run. It keys the noise, so that
            samples depend neither on the layout nor on where they are generated.
        first_index: number of the batch's first sample in the step.
        block: prompts per mini-batch, see `replica_share`.

    Returns:
        The replica's samples; none where it has no prompt.
    """
    share = replica_share(len(prompts), transition.groups, block)
    mine = [(i, s) for i in share for s in range(n)]
    responses = []
    if mine:
        responses = transition.generate(
            [prompts[i].token_ids for i, _ in mine], sampling,
            requests=[first_request + i * n + s for i, s in mine],
        )  # fmt: skip
    texts = [tokenizer.decode(r.token_ids) for r in responses]
    return make_batch(
        [prompts[i] for i, _ in mine], responses, texts,
        [first_index + i * n + s for i, s in mine], n,
    )  # fmt: skip
