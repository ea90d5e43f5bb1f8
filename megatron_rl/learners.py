"""Epochs of mini-batches on one rollout, for every model that learns from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithms.metrics import add_metrics
from megatron_rl.config import Config
from megatron_rl.engine.optimizer import StepResult, Trainable
from megatron_rl.engine.update import Loss, mini_batches, update_step
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.models.shared_embedding import SharedEmbedding
from megatron_rl.monitor.summary import Updates
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.exchange import share_under

Phase = Callable[[str], AbstractContextManager[None]]
Outcome = tuple[StepResult, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A model and what it learns from a rollout.

    Attributes:
        role: "critic" or "actor"; its phase is `update_<role>`.
        aggregation: of the tokens in its loss (`algorithms.losses.token_weights`).
        reference: model whose hidden states the loss needs.
    """

    role: str
    trainable: Trainable
    loss: Loss
    aggregation: str
    reference: ParallelModel | None = None

    def step(
        self, batch: RolloutBatch, samples: list[int], config: Config,
        embedding: SharedEmbedding | None = None,
    ) -> Outcome:  # fmt: skip
        """One optimizer step; see `update_step`."""
        return update_step(
            self.trainable, batch, samples, config, self.loss, self.aggregation, self.reference,
            embedding,
        )  # fmt: skip


def train_one_by_one(
    learners: list[Learner], batch: RolloutBatch, groups: ParallelGroups, config: Config,
    phase: Phase,
) -> Updates:  # fmt: skip
    """All epochs of one model, then all of the next: one model's gradients exist at a time.

    Args:
        batch: this rank's samples under `groups`; learners may be laid out differently.
        phase: times what happens, by name.
    """
    updates: Updates = {}
    for learner in learners:
        with phase(f"update_{learner.role}"):
            share = share_under(batch, groups, learner.trainable.model.groups)
            outcomes = [
                learner.step(share, samples, config) for samples in _all_mini_batches(share, config)
            ]
            learner.trainable.release_gradients()
        updates[learner.role] = _joined(outcomes)
    return updates


def train_jointly(
    critic: Learner, actor: Learner, embedding: SharedEmbedding, batch: RolloutBatch,
    config: Config, phase: Phase,
) -> Updates:  # fmt: skip
    """Both models step on each mini-batch, the actor with the critic's gradient of the table.

    The critic's step changes nothing that the actor's loss depends on, so that both gradients are
    those of the same weights. Still one model's gradient buffers exist at a time, beside the
    table's part. Where that part is not finite, neither is the actor's norm, and the actor skips
    the step.
    """
    outcomes: dict[str, list[Outcome]] = {"critic": [], "actor": []}
    for samples in _all_mini_batches(batch, config):
        with phase("update_critic"):
            if actor.trainable.gathers_params:  # the critic reads the table without Megatron's hook
                actor.trainable.finish_param_gather()
            outcomes["critic"].append(critic.step(batch, samples, config))
            critic.trainable.release_gradients()
        with phase("update_actor"):
            outcomes["actor"].append(actor.step(batch, samples, config, embedding))
            actor.trainable.release_gradients()
    return {role: _joined(mine) for role, mine in outcomes.items()}


def _all_mini_batches(batch: RolloutBatch, config: Config) -> list[list[int]]:
    return mini_batches(batch, config) * config.training.epochs


def _joined(outcomes: list[Outcome]) -> tuple[list[StepResult], dict[str, Tensor]]:
    return [result for result, _ in outcomes], add_metrics([sums for _, sums in outcomes])
