"""Optimizer steps on a rollout: epochs of mini-batches of micro-batches, actor and critic.

Every loss is a sum of per-token terms times weights that already hold the mini-batch's global
counts, so neither data parallelism nor the micro-batch split can change a gradient.

Shapes: B samples of this replica, R longest response, N rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.histograms import ratio_counts
from megatron_rl.algorithms.kl import kl_loss, weighted_kl
from megatron_rl.algorithms.losses import (
    count_tokens,
    entropy_loss,
    policy_loss,
    token_weights,
    value_loss,
)
from megatron_rl.algorithms.metrics import add_metrics, reduce_metrics
from megatron_rl.algorithms.plugins import POLICY_LOSS_FUNCTION_ARGS, load_function
from megatron_rl.algorithms.rollout_correction import drift_metrics, truncated_importance_weights
from megatron_rl.config import Config
from megatron_rl.engine.microbatch import MicroBatch, inert
from megatron_rl.engine.optimizer import StepResult, Trainable
from megatron_rl.engine.passes import (
    attach_reference,
    full_kl,
    make_microbatches,
    token_logprobs,
)
from megatron_rl.engine.schedule import forward_backward
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.shared_embedding import SharedEmbedding
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch

Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


def actor_loss(
    model: ParallelModel, config: Config, kl_coef: float, reference: ParallelModel | None = None
) -> Loss:
    """Policy loss, entropy bonus and KL loss of the configured algorithm.

    `reference` is needed for the KL of whole distributions (`algorithm.kl.estimator: full`).

    Fields of a micro-batch: `weights`, `advantages`, `rollout_logprobs`, and where they exist
    `old_logprobs` and `ref_logprobs`. Without `old_logprobs` this is the first and only update on
    the batch, and the policy is its own old policy: the ratio is exactly one.
    """
    algorithm = config.algorithm
    custom = algorithm.policy_loss_function
    own_loss = load_function(custom, POLICY_LOSS_FUNCTION_ARGS) if custom else None

    def loss(logits_NV: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        fields, weights = micro.fields, micro.fields["weights"]
        logp_N, entropy_N = token_logprobs(
            logits_NV, micro.labels_N, model, config, with_entropy=True
        )
        old_N = fields.get("old_logprobs", logp_N.detach())
        if own_loss is not None:
            total, metrics = own_loss(
                logp=logp_N, old_logp=old_N, advantages=fields["advantages"], weights=weights
            )
        else:
            correction = None
            if algorithm.importance_sampling.enable:
                correction = truncated_importance_weights(
                    old_N, fields["rollout_logprobs"], algorithm.importance_sampling.cap
                )
            total, metrics = policy_loss(
                logp_N, old_N, fields["advantages"], weights, clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip,
                is_weights=correction,
            )  # fmt: skip
        bonus, entropy_metrics = entropy_loss(
            entropy_N if algorithm.entropy_coef else entropy_N.detach(), weights
        )
        metrics = metrics | entropy_metrics | drift_metrics(
            old_N, fields["rollout_logprobs"], weights != 0,
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high,
        )  # fmt: skip
        metrics["ratio_hist"] = ratio_counts(logp_N.detach() - old_N, weights != 0)
        if algorithm.entropy_coef:
            total = total + algorithm.entropy_coef * bonus
        if algorithm.kl.placement == "loss":
            if algorithm.kl.estimator == "full":
                kl, kl_metrics = weighted_kl(
                    full_kl(logits_NV, micro, model, reference, config), weights
                )
            else:
                kl, kl_metrics = kl_loss(
                    logp_N, fields["ref_logprobs"], weights, algorithm.kl.estimator,
                    algorithm.kl.clamp,
                )  # fmt: skip
            total, metrics = total + kl_coef * kl, metrics | kl_metrics
        return total, metrics

    return loss


def critic_loss(config: Config) -> Loss:
    """Clipped value loss; fields `weights`, `values` (old) and `returns`."""

    def loss(values_N: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        fields = micro.fields
        return value_loss(
            values_N, fields["values"], fields["returns"], fields["weights"],
            clip=config.algorithm.value_clip,
        )  # fmt: skip

    return loss


def mini_batches(batch: RolloutBatch, config: Config) -> list[list[int]]:
    """This replica's samples of each optimizer step of an epoch, in order.

    A sample's number in the step decides, so all replicas take the same steps, with the samples
    that any other layout would take; a replica may have none in some of them.
    """
    size = config.mini_batch_size
    lists: list[list[int]] = [[] for _ in range(-(-config.samples_per_step // size))]
    for row, index in enumerate(batch.index_B.tolist()):
        lists[index // size].append(row)
    return lists


def update_step(
    trainable: Trainable, batch: RolloutBatch, samples: list[int], config: Config, loss: Loss,
    aggregation: str, reference: ParallelModel | None = None,
    embedding: SharedEmbedding | None = None,
) -> tuple[StepResult, dict[str, Tensor]]:  # fmt: skip
    """One optimizer step on the given samples.

    Args:
        reference: model whose hidden states the loss needs for the KL of whole distributions.
        embedding: brings another model's gradient of this model's embedding table.

    Returns:
        The step's outcome and metric sums over all replicas (on every rank).
    """
    model = trainable.model
    groups = model.groups
    mask_BR = batch.mask_BR[samples]
    counts = torch.stack(count_tokens(mask_BR)).to(torch.float64)
    dist.all_reduce(counts, group=groups.data_control())
    weights_BR = torch.zeros_like(batch.mask_BR)
    weights_BR[samples] = token_weights(
        mask_BR, aggregation, n_tokens=float(counts[0]), n_sequences=float(counts[1]),
        constant=config.algorithm.loss_constant,
    )  # fmt: skip
    fields = {k: v for k, v in batch.tensors.items() if v.dim() == 2} | {
        "weights": weights_BR, "rollout_logprobs": batch.rollout_logprobs_BR,
    }  # fmt: skip
    micro = make_microbatches(
        batch, model, config, rows="response", samples=samples, fields=fields
    ) or [inert(model, "response", fields)]
    if reference is not None and samples:
        attach_reference(micro, reference)
    trainable.zero_grad()
    if embedding is not None:
        embedding.hand_over()
    parts = forward_backward(model, micro, loss, _max_over(len(micro), groups))
    return trainable.step(), share_metrics(parts, groups)


def share_metrics(parts: list[dict[str, Tensor]], groups: ParallelGroups) -> dict[str, Tensor]:
    """Sums metrics over micro-batches and replicas; all pipeline stages get them."""
    payload: list[Any] = [None]
    if groups.is_last_stage:
        total = {k: v.cpu() for k, v in add_metrics(parts).items()}
        payload = [reduce_metrics(total, groups.data_control())]
    if groups.layout.pp > 1:
        last = groups.stage_rank(groups.layout.pp - 1)
        dist.broadcast_object_list(payload, last, group=groups.pipeline_control())
    return payload[0]


def _max_over(count: int, groups: ParallelGroups) -> int:
    """The largest count over replicas: all run as many micro-batches, the extra ones inert."""
    value = torch.tensor([count])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=groups.data_control())
    return int(value)
