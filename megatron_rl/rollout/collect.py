"""Generates a replica's share of a batch of prompts."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.generation.engine import EngineSettings
from megatron_rl.generation.sequence import SamplingParams
from megatron_rl.parallel import ParallelGroups
from megatron_rl.resharding.transition import Transition
from megatron_rl.rollout.batch import RolloutBatch, make_batch
from megatron_rl.rollout.prompts import Prompt
from megatron_rl.rollout.routes import join_stages
from megatron_rl.rollout.work_list import WorkList
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
        cuda_graphs=rollout.cuda_graphs, keep_routes=rollout.router_replay,
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


def replica_share(
    count: int, groups: ParallelGroups, block: int | None = None, *, rank: int | None = None
) -> list[int]:
    """Indices of a batch of `count` prompts that this replica (or that of `rank`) works on.

    Every `block` consecutive prompts are spread over all replicas: with blocks of one mini-batch,
    an optimizer step sees the same samples for every data parallel size.
    """
    dp, block = groups.layout.dp, block or max(count, 1)
    rank = groups.dp_rank if rank is None else rank
    share: list[int] = []
    for start in range(0, count, block):
        size = min(block, count - start)
        share += range(start + size * rank // dp, start + size * (rank + 1) // dp)
    return share


def collect(
    transition: Transition, tokenizer: Tokenizer, prompts: list[Prompt], *, n: int,
    sampling: SamplingParams, first_request: int, first_index: int = 0, block: int | None = None,
    work_list: int | None = None,
) -> RolloutBatch:  # fmt: skip
    """Generates `n` samples for each of this replica's prompts.

    Args:
        prompts: of the whole batch, the same on every rank.
        first_request: number of the batch's first sample in the run. It keys the noise, so that
            samples depend neither on the layout nor on where they are generated.
        first_index: number of the batch's first sample in the step.
        block: prompts per mini-batch, see `replica_share`.
        work_list: a number that no batch of this process group had before: prompts that do not
            start at once may go to another replica. None: each keeps its share.

    Returns:
        The replica's samples; none where it has no prompt.
    """
    groups = transition.groups
    share = replica_share(len(prompts), groups, block)
    requests = [[first_request + i * n + s for s in range(n)] for i in range(len(prompts))]
    at_once, dp, responses = transition.engine.settings.max_running // n, groups.layout.dp, []
    stays = dp == 1 or transition.moves_weights or len(prompts) <= at_once * dp
    if work_list is not None and not stays:
        shares = [replica_share(len(prompts), groups, block, rank=r) for r in range(dp)]
        started = {i for other in shares for i in other[:at_once]}
        todo = WorkList(
            groups, own=share[:at_once], n=n, batch=work_list,
            shared=[i for i in range(len(prompts)) if i not in started],
        )  # fmt: skip
        served = transition.engine.serve(
            [p.token_ids for p in prompts], sampling, requests=requests, take=todo.take
        )
        share = sorted(served)
        responses = [response for i in share for response in served[i]]
    elif share:
        responses = transition.generate(
            [prompts[i].token_ids for i in share for _ in range(n)], sampling,
            requests=[number for i in share for number in requests[i]],
        )  # fmt: skip
    mine = [(i, s) for i in share for s in range(n)]
    texts = [tokenizer.decode(r.token_ids) for r in responses]
    return make_batch(
        [prompts[i] for i, _ in mine], responses, texts,
        [first_index + i * n + s for i, s in mine], n,
        routes=join_stages(responses, transition.engine.model),
    )  # fmt: skip
