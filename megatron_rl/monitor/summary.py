"""The numbers of a step: rollout statistics, losses, time, memory, throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.metrics import mean_metrics
from megatron_rl.engine.optimizer import StepResult
from megatron_rl.monitor.flops import Workload
from megatron_rl.monitor.metrics import ACTOR_NAMES, CRITIC_NAMES
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch

Updates = dict[str, tuple[list[StepResult], dict[str, Tensor]]]
"""Role → outcome of its optimizer steps, and the metric sums of its loss."""


def rollout_metrics(
    batch: RolloutBatch, groups: ParallelGroups
) -> tuple[dict[str, float], Workload]:
    """Rewards, lengths, the KL from the reference and the work that the rollout is.

    Over all replicas. The KL is measured before it shapes any reward: the mean per token, and per
    response.
    """
    lengths_B = batch.length_B.double()
    sums = {
        "samples": float(len(batch)), "reward": batch.scores_B.double().sum(),
        "reward_sq": batch.scores_B.double().square().sum(), "length": lengths_B.sum(),
        "prompt": float(sum(batch.prompt_lengths)), "truncated": (~batch.finished_B).sum(),
        "trained": batch.mask_BR.double().sum(), "kl": 0.0,
        "advantage": (batch.tensors["advantages"] * batch.mask_BR).double().sum(),
        "model_scores": 0.0,
    } | _work_of(batch)  # fmt: skip
    if "ref_logprobs" in batch.tensors:
        policy = batch.tensors.get("old_logprobs", batch.rollout_logprobs_BR)
        delta = (policy - batch.tensors["ref_logprobs"]) * batch.mask_BR
        sums["kl"] = delta.double().sum()
    if "model_scores" in batch.tensors:
        sums["model_scores"] = batch.tensors["model_scores"].double().sum()
    values = torch.tensor([float(v) for v in sums.values()], dtype=torch.float64)
    extremes = torch.tensor(
        [float(batch.scores_B.max()), -float(batch.scores_B.min()), float(lengths_B.max())],
        dtype=torch.float64,
    )  # fmt: skip
    dist.all_reduce(values, group=groups.data_control())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=groups.data_control())
    total = dict(zip(sums, values.tolist(), strict=True))
    n, trained = total["samples"], max(total["trained"], 1.0)
    mean = total["reward"] / n
    metrics = {
        "reward/mean": mean, "reward/std": max(total["reward_sq"] / n - mean**2, 0.0) ** 0.5,
        "reward/max": extremes[0].item(), "reward/min": -extremes[1].item(),
        "length/response_mean": total["length"] / n, "length/response_max": extremes[2].item(),
        "length/prompt_mean": total["prompt"] / n, "length/truncated": total["truncated"] / n,
        "advantage/mean": total["advantage"] / trained,
    }  # fmt: skip
    if "model_scores" in batch.tensors:
        metrics["reward/model_mean"] = total["model_scores"] / n
    if "ref_logprobs" in batch.tensors:
        metrics |= {"kl/ref": total["kl"] / trained, "kl/ref_per_response": total["kl"] / n}
    work = Workload(
        prompt_tokens=total["prompt"], response_tokens=total["length"], contexts=total["contexts"],
        generated_tokens=total["generated_tokens"],
        generated_contexts=total["generated_contexts"],
    )  # fmt: skip
    return metrics, work


def _work_of(batch: RolloutBatch) -> dict[str, float]:
    """Sums for `Workload`, of one replica."""
    groups = batch.group_B.tolist()
    firsts = {group: row for row, group in reversed(list(enumerate(groups)))}
    shared = [batch.prompt_lengths[row] for row in firsts.values()]
    squares = sum(
        (p + r) ** 2
        for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True)
    )  # fmt: skip
    prompt_squares = sum(p**2 for p in batch.prompt_lengths)
    shared_squares = sum(p**2 for p in shared)
    return {
        "contexts": squares / 2,
        "generated_tokens": float(sum(shared) + sum(batch.response_lengths)),
        "generated_contexts": (squares - prompt_squares + shared_squares) / 2,
    }


def learning_metrics(updates: Updates, *, kl_coef: float) -> dict[str, float]:
    """Losses, gradient norms and learning rates of a step, under their public names."""
    metrics = {"kl/coef": kl_coef}
    for role, (results, sums) in updates.items():
        names = ACTOR_NAMES if role == "actor" else CRITIC_NAMES
        steps = max(len(results), 1)
        means = mean_metrics(sums)
        for key, name in names.items():
            if key in means:
                # Losses are already sums of one mini-batch: average them over the steps.
                metrics[name] = means[key] / steps if key.endswith("_loss") else means[key]
        section = "policy" if role == "actor" else "value"
        metrics[f"{section}/grad_norm"] = sum(r.grad_norm for r in results) / steps
        metrics[f"{section}/learning_rate"] = results[-1].lr
        metrics[f"{section}/skipped_steps"] = float(sum(r.skipped for r in results))
    return metrics


@dataclass(kw_only=True, slots=True)
class EvaluationResult:
    """Sums over evaluated prompts of this replica."""

    count: float = 0.0
    reward: float = 0.0
    length: float = 0.0

    def add(self, batch: RolloutBatch) -> None:
        self.count += len(batch)
        self.reward += float(batch.scores_B.double().sum())
        self.length += float(batch.length_B.sum())

    def reduce(self, groups: ParallelGroups) -> dict[str, Any]:
        """Means over all replicas."""
        sums = torch.tensor([self.count, self.reward, self.length], dtype=torch.float64)
        dist.all_reduce(sums, group=groups.data_control())
        count, reward, length = sums.tolist()
        return {
            "eval/reward_mean": reward / max(count, 1), "eval/prompts": count,
            "eval/response_length": length / max(count, 1),
        }  # fmt: skip
