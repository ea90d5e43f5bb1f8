"""Forward passes over a rollout: log-probs, entropies and values, response-aligned.

Results exist on the last pipeline stage, are scattered back to `[B, R]` and shared with the other
stages, so that every rank of a replica continues with the same numbers.

Shapes: B samples, R longest response, N head rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.logprobs import vocab_parallel_logprobs
from megatron_rl.algorithms.truncation import truncation_threshold_T
from megatron_rl.algorithms.vocab_kl import vocab_parallel_kl
from megatron_rl.config import Config
from megatron_rl.engine.microbatch import MicroBatch, pack, partition
from megatron_rl.engine.schedule import forward_only
from megatron_rl.models.flops import sample_flops
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.heads import vocabulary_logits
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch


def token_logprobs(
    logits_NV: Tensor, labels_N: Tensor, model: ParallelModel, config: Config, *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """fp32 log-probs of `labels_N` under the distribution that generation samples from.

    The one function between logits and log-probs in training: the temperature and the top-k/top-p
    mask are those of the rollout.
    """
    rollout, shard = config.rollout, _vocabulary_shard(model)
    temperature, threshold_N = rollout.temperature or 1.0, None
    if rollout.top_k or rollout.top_p < 1.0:
        threshold_N = truncation_threshold_T(
            logits_NV.detach(), rollout.top_k, rollout.top_p, temperature=temperature, **shard
        )
    out = vocab_parallel_logprobs(
        logits_NV, labels_N, temperature=temperature, with_entropy=with_entropy,
        min_logit_T=threshold_N, **shard,
    )  # fmt: skip
    return out if with_entropy else (out, None)


def full_kl(
    logits_NV: Tensor, micro: MicroBatch, model: ParallelModel, reference: ParallelModel,
    config: Config,
) -> Tensor:  # fmt: skip
    """KL(policy ‖ reference) of each row over the whole vocabulary, fp32 `[N]`.

    The reference's logits exist beside the policy's for this micro-batch only; they are made of
    `micro.reference_NE`, which takes hidden / vocabulary of their memory. An inert row has none
    and gets 0.
    """
    ref_NV = logits_NV.detach()
    if not micro.inert:
        weight_VE = reference.chunks[-1].head_weight().detach()
        ref_NV = vocabulary_logits(
            micro.reference_NE, weight_VE, fp32=reference.config.fp32_logits
        )
    return vocab_parallel_kl(
        logits_NV, ref_NV, temperature=config.rollout.temperature or 1.0, **_vocabulary_shard(model)
    )


def attach_reference(micro_batches: list[MicroBatch], reference: ParallelModel) -> None:
    """Runs the reference over micro-batches of the actor and keeps its final hidden states.

    All of them go through the pipeline in one call; a forward of another model can't run inside
    the loss function, which only the last stage calls.
    """
    views = [
        replace(m, attention=replace(m.attention, hidden_only=True, routes_LTK=None))
        for m in micro_batches
    ]
    hidden = forward_only(reference, views, lambda rows_NE, micro: rows_NE)
    for micro, rows_NE in zip(micro_batches, hidden, strict=False):  # empty but on the last stage
        micro.reference_NE = rows_NE


def _vocabulary_shard(model: ParallelModel) -> dict[str, Any]:
    return dict(
        group=model.groups.tp, vocab_start=model.vocab_start, vocab_size=model.arch.vocab,
        padded_vocab_size=model.padded_vocab,
    )  # fmt: skip


def make_microbatches(
    batch: RolloutBatch, model: ParallelModel, config: Config, *, rows: str,
    samples: Sequence[int] | None = None, fields: dict[str, Tensor] | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """Cuts (part of) a rollout into micro-batches by the configured size or token budget.

    Those of the actor take the experts that generation took, where the rollout says which.
    """
    samples = range(len(batch)) if samples is None else samples
    training = config.training
    lengths = [len(batch.sequences[i]) for i in samples]
    parts = partition(
        lengths, micro_batch_size=training.micro_batch_size,
        max_tokens=training.max_tokens_per_micro_batch,
        costs=[
            sample_flops(model.arch, length, batch.response_lengths[i])
            for length, i in zip(lengths, samples, strict=True)
        ],
    )  # fmt: skip
    chosen = [[samples[k] for k in part] for part in parts]
    replay = model.role == "actor"
    return [
        pack(
            [batch.sequences[i] for i in part], [batch.prompt_lengths[i] for i in part],
            model=model, rows=rows, samples=part, fields=fields, padded=not training.packing,
            routes=[batch.routes[i] for i in part] if replay else (),
        )
        for part in chosen
    ]  # fmt: skip


def logprob_pass(batch: RolloutBatch, model: ParallelModel, config: Config) -> Tensor:
    """Log-prob of every response token, fp32 `[B, R]`, 0 on padding."""

    def head(logits: Tensor, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        return micro, token_logprobs(logits, micro.labels_N, model, config)[0]

    return _response_pass(batch, model, config, "response", head, batch.mask_BR.shape[1])


def value_pass(
    batch: RolloutBatch, model: ParallelModel, config: Config
) -> tuple[Tensor, Tensor]:
    """The critic's values.

    Returns:
        fp32 `[B, R]`, the value of the state before each response token (0 on padding), and `[B]`,
        that of the state after the last one.
    """
    width = batch.mask_BR.shape[1]

    def head(values: Tensor, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        return micro, values

    values = _response_pass(batch, model, config, "values", head, width + 1)
    after_B = values.gather(1, batch.length_B[:, None]).squeeze(1)
    return values[:, :width] * batch.mask_BR, after_B


def _response_pass(
    batch: RolloutBatch, model: ParallelModel, config: Config, rows: str, head: Callable,
    width: int,
) -> Tensor:  # fmt: skip
    micro_batches = make_microbatches(batch, model, config, rows=rows)
    out_BR = torch.zeros(len(batch), width)
    for micro, result_N in forward_only(model, micro_batches, head):
        if not micro.inert:
            out_BR[micro.sample_N.cpu(), micro.step_N.cpu()] = result_N.float().cpu()
    return share_from_last_stage(out_BR, model.groups)


def share_from_last_stage(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Broadcasts a CPU tensor of equal shape from the last pipeline stage to the others."""
    if groups.layout.pp > 1:
        dist.broadcast(x, groups.stage_rank(groups.layout.pp - 1), group=groups.pipeline_control())
    return x


def needs_old_logprobs(config: Config) -> bool:
    """Whether a pass of its own must compute the actor's log-probs before the update.

    With one optimizer step per rollout the update's own log-probs are the old ones. A KL in the
    reward, a correction by importance weights, or several steps need them beforehand.
    """
    several = config.training.epochs > 1 or config.mini_batch_size < config.samples_per_step
    return (
        several
        or config.algorithm.kl.placement == "reward"
        or config.algorithm.importance_sampling.enable
        or config.algorithm.policy_loss_function is not None
    )
