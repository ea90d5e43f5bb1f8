"""From scores to advantages, by the configured algorithm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms import advantages as estimators
from megatron_rl.algorithms import reward_shaping as shaping
from megatron_rl.algorithms.kl import kl_penalty
from megatron_rl.algorithms.plugins import ADVANTAGE_FUNCTION_ARGS, load_function
from megatron_rl.algorithms.rollout_correction import sequence_drift_mask
from megatron_rl.algorithms.whitening import whiten
from megatron_rl.config import Config
from megatron_rl.rollout.batch import RolloutBatch


def shape_scores(batch: RolloutBatch, config: Config) -> Tensor:
    """Scores after the missing-EOS and overlong penalties, `[B]`; applies the overlong filter."""
    algorithm, overlong = config.algorithm, config.algorithm.overlong
    scores_B = shaping.missing_eos_penalty(
        batch.scores_B, batch.finished_B, algorithm.missing_eos_penalty
    )
    if overlong.enable:
        scores_B = scores_B + shaping.overlong_penalty(
            batch.length_B, max_length=overlong.max_length or config.rollout.max_new_tokens,
            buffer=overlong.buffer, factor=overlong.factor,
        )  # fmt: skip
    if overlong.filter:
        batch.mask_BR = shaping.overlong_filter(batch.mask_BR, batch.finished_B)
    return scores_B


def estimate_advantages(
    batch: RolloutBatch, config: Config, *, kl_coef: float, dp_group: dist.ProcessGroup
) -> None:
    """Adds `advantages` (and `returns` for a critic) to `batch.tensors`.

    Needs `scores_B`; `old_logprobs` and `ref_logprobs` where the KL is part of the reward; `values`
    and `bootstrap` with a critic. Whole groups must be on one replica.
    """
    algorithm, tensors = config.algorithm, batch.tensors
    scores_B = shape_scores(batch, config)
    threshold = algorithm.importance_sampling.sequence_mask_threshold
    if algorithm.importance_sampling.enable and threshold is not None:
        batch.mask_BR = sequence_drift_mask(
            tensors["old_logprobs"], batch.rollout_logprobs_BR, batch.mask_BR, threshold=threshold
        )
    mask_BR = batch.mask_BR
    kl_BR = None
    if algorithm.kl.placement == "reward":
        kl_BR = kl_penalty(
            tensors["old_logprobs"], tensors["ref_logprobs"], algorithm.kl.estimator,
            algorithm.kl.clamp,
        )  # fmt: skip
    rewards_BR = shaping.response_rewards(scores_B, kl_BR, kl_coef, mask_BR, batch.length_B)
    if algorithm.advantage_function:
        own = load_function(algorithm.advantage_function, ADVANTAGE_FUNCTION_ARGS)
        tensors["advantages"], _ = own(
            scores_B=scores_B, rewards_BR=rewards_BR, values_BR=tensors.get("values"),
            mask_BR=mask_BR, group_B=batch.group_B,
        )  # fmt: skip
        tensors["returns"] = estimators.discounted_suffix_sums(rewards_BR, algorithm.gamma)
        return
    if algorithm.name == "ppo":
        _generalised_advantages(batch, config, rewards_BR, dp_group)
        return
    if algorithm.name == "reinforce_plus_plus":
        tensors["advantages"], _ = estimators.reinforce_plus_plus(
            rewards_BR, mask_BR, algorithm.gamma, group=dp_group
        )
        return
    # Group baselines judge the sum of the rewards: with the KL in the reward it is part of it.
    totals_B = (rewards_BR * mask_BR).sum(-1)
    if algorithm.name == "grpo":
        per_sample = estimators.group_advantages(
            totals_B, batch.group_B, std=algorithm.advantage_std
        )
        tensors["advantages"] = estimators.broadcast_to_tokens(per_sample, mask_BR)
    elif algorithm.name == "rloo":
        per_sample = estimators.rloo(totals_B, batch.group_B)
        tensors["advantages"] = estimators.broadcast_to_tokens(per_sample, mask_BR)
    else:
        tensors["advantages"] = estimators.reinforce_plus_plus_baseline(
            totals_B, batch.group_B, mask_BR, group=dp_group
        )


def _generalised_advantages(
    batch: RolloutBatch, config: Config, rewards_BR: Tensor, dp_group: dist.ProcessGroup
) -> None:
    algorithm, tensors = config.algorithm, batch.tensors
    lam: float | Tensor = algorithm.lam
    if algorithm.lam_length_adaptive:
        lam = estimators.length_adaptive_lambda(batch.length_B, algorithm.lam_length_constant)
    bootstrap_B = shaping.bootstrap_values(
        tensors["bootstrap"], batch.finished_B, algorithm.missing_eos_penalty
    )
    advantages_BR, tensors["returns"] = estimators.gae(
        rewards_BR, tensors["values"], batch.mask_BR, gamma=algorithm.gamma, lam=lam,
        bootstrap_B=bootstrap_B,
    )  # fmt: skip
    if algorithm.whiten_advantages:
        advantages_BR = whiten(advantages_BR, batch.mask_BR, group=dp_group)
    tensors["advantages"] = torch.where(batch.mask_BR.bool(), advantages_BR, 0.0)
