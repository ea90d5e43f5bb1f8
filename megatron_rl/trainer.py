"""The training loop: rollout → score → log-probs and values → advantages → update.

Every rank runs this program. `Trainer` builds the models once and owns what a run is made of; each
phase is one call into the module that knows how.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.algorithms.kl import AdaptiveKL, FixedKL
from megatron_rl.algorithms.metrics import add_metrics
from megatron_rl.checkpoint import CheckpointManager, RngState
from megatron_rl.config import Config
from megatron_rl.convert.huggingface import export_huggingface
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.engine.passes import logprob_pass, value_pass
from megatron_rl.engine.update import actor_loss, critic_loss, mini_batches, update_step
from megatron_rl.models.flops import sample_flops
from megatron_rl.monitor.out_of_memory import explain_out_of_memory
from megatron_rl.monitor.phases import PhaseTimer
from megatron_rl.monitor.run_monitor import RunMonitor
from megatron_rl.monitor.summary import EvaluationResult, Updates
from megatron_rl.rewards.base import RewardFunction, score
from megatron_rl.rewards.model import learned_scores
from megatron_rl.rollout.advantages import estimate_advantages
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.collect import collect, prompts_per_block, sampling_params
from megatron_rl.rollout.dynamic_sampling import fill_batch
from megatron_rl.rollout.exchange import balance
from megatron_rl.run_inputs import RunInputs
from megatron_rl.runtime import Environment, Runtime, StoppedBySignal, log
from megatron_rl.setup_models import Models, build_models

EVALUATION_REQUESTS = 2**40  # evaluation draws its noise far from training's


class Trainer:
    """A run: `train()` does all of it, or call `step()` yourself.

    Args:
        config: the whole configuration.
        reward: reward function instead of `reward.function`, called with keyword arguments
            `prompts`, `responses`, `records` (lists of equal length), returning one number each.

    Raises:
        ConfigError: for wrong input, before any process group exists.
    """

    def __init__(self, config: Config, reward: RewardFunction | None = None) -> None:
        self.config = config
        env = Environment.read()
        config.validate_world(env.world_size)
        self.inputs = RunInputs.check(config, reward)
        self.runtime = Runtime(config, env)
        self.runtime.start(inputs_may_be_late=self.inputs.may_be_late)
        self.timer = PhaseTimer(self.runtime.device)
        self.timer.on_error = self._explain
        self.models: Models | None = None
        with self.timer.phase("startup"):
            self.models = build_models(config, self.inputs, env.world_size)
        self.groups = self.models.actor.model.groups
        kl = config.algorithm.kl
        log.info(
            "rank %d of %d on %s, %s; tp %d dp %d pp %d of %s",
            env.rank, env.world_size, self.runtime.device, config.training.dtype,
            self.groups.tp_rank, self.groups.dp_rank, self.groups.pp_rank, self.groups.layout,
        )  # fmt: skip
        self.kl = (
            AdaptiveKL(kl.coef, target=kl.adaptive.target, horizon=kl.adaptive.horizon)
            if kl.adaptive.enable
            else FixedKL(kl.coef)
        )
        self.step_count, self.samples_drawn, self.closed = 0, 0, False
        self.critic_biased = False
        self.last_metrics: dict[str, float] = {}
        self.checkpoints = self._checkpoints()
        with self.timer.phase("startup"):
            self._resume()
        self.runtime.catch_signals()
        self.monitor = RunMonitor(
            config, self.inputs.architectures, self.groups, self.timer, first_step=self.step_count
        )

    # ---- the run -------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Runs to `training.steps` with evaluation and checkpoints.

        Returns:
            The last step's metrics, and the evaluations at both ends where they are on.

        Raises:
            StoppedBySignal: after SIGTERM or SIGUSR1, when the checkpoint is on disk.
        """
        config, metrics = self.config, {}
        if config.evaluation.at_start and self.step_count == 0:
            metrics |= {f"start/{k}": v for k, v in self.evaluate().items()}
        while self.step_count < config.training.steps:
            metrics |= self.step()
            every = config.evaluation.interval
            if every and self.step_count % every == 0 and self.step_count < config.training.steps:
                self.evaluate()
            self._save_if_due()
        if config.evaluation.at_end:
            metrics |= {f"end/{k}": v for k, v in self.evaluate().items()}
        if config.checkpoint.export_huggingface:
            self.export(Path(config.run_dir) / "huggingface")
        self.monitor.finish()
        return metrics

    def step(self) -> dict[str, float]:
        """One training step; see the module's first line.

        Returns:
            The metrics that are logged, equal on all ranks.
        """
        self.monitor.begin_step(self.step_count + 1)
        batch, sampling = self._rollout()
        self._evaluate_policies(batch)
        with self.timer.phase("advantages"):
            estimate_advantages(
                batch, self.config, kl_coef=self.kl.coef, dp_group=self.groups.data_control()
            )
        updates = self._update(batch)
        self.step_count += 1
        metrics = self.monitor.end_step(
            self.step_count, batch, updates, kl_coef=self.kl.coef, more=sampling
        )
        if "kl/ref_per_response" in metrics:
            self.kl.update(metrics["kl/ref_per_response"], self.config.samples_per_step)
        self.last_metrics = metrics
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out prompts (`data.eval`), sampled as `evaluation` says."""
        config, prompts = self.config, self.inputs.eval_prompts()
        size = config.evaluation.batch_size or len(prompts)
        total = EvaluationResult()
        with self._on_generation_layout(), self.timer.phase("evaluation"):
            for first in range(0, len(prompts), size):
                batch = self._generate(
                    prompts[first : first + size], n=1,
                    temperature=config.evaluation.temperature,
                    first_request=EVALUATION_REQUESTS + first,
                )  # fmt: skip
                if batch is not None:
                    self._reward(batch)
                    total.add(batch)
        metrics = total.reduce(self.groups)
        self.monitor.evaluation(self.step_count, metrics)
        return metrics

    def save(self) -> Path:
        """Writes a checkpoint of this step; resuming from it continues exactly."""
        with self.timer.phase("checkpoint"):
            return self.checkpoints.save(self.step_count, metrics=self.last_metrics)

    def export(self, folder: str | Path) -> None:
        """Writes the actor as a Hugging Face folder."""
        export_huggingface(
            self.models.actor.model, folder, source=self.inputs.folders["actor"],
            dtype=self.config.training.dtype,
        )  # fmt: skip
        dist.barrier()

    def close(self) -> None:
        """Finishes writers and pending saves and leaves the process group; safe to call twice."""
        self.monitor.close()
        if not self.closed:
            self.closed = True
            # Waits for a background save; skipped after a crash, when other ranks may not answer.
            if sys.exc_info()[0] in (None, StoppedBySignal):
                self.checkpoints.close()
        self.runtime.close()

    # ---- phases --------------------------------------------------------------------------------

    def _rollout(self) -> tuple[RolloutBatch, dict[str, float]]:
        """Generated and scored samples of the step, spread over the replicas by cost."""
        config, groups, metrics = self.config, self.groups, {}
        if config.algorithm.dynamic_sampling.enable:
            batch, metrics = fill_batch(
                self._draw, prompts=config.rollout.batch_size, n=config.rollout.n,
                max_batches=config.algorithm.dynamic_sampling.max_batches, groups=groups,
            )  # fmt: skip
        else:
            batch = self._draw()
        return balance(
            batch, groups, cost=partial(sample_flops, self.inputs.architectures["actor"]),
            block=prompts_per_block(config, groups.layout.dp),
        ), metrics  # fmt: skip

    def _draw(self, first_index: int = 0) -> RolloutBatch:
        """Samples for the next `rollout.batch_size` prompts, with their scores."""
        config = self.config
        prompts = self.inputs.stream.take(config.rollout.batch_size)
        with self._on_generation_layout(), self.timer.phase("generation"):
            batch = self._generate(
                prompts, n=config.rollout.n, temperature=config.rollout.temperature,
                first_request=self.samples_drawn, first_index=first_index,
            )  # fmt: skip
        assert batch is not None, "rollout.batch_size gives every replica a prompt: checked"
        self.samples_drawn += config.samples_per_step
        with self.timer.phase("scoring"):
            self._reward(batch)
        return batch

    @contextmanager
    def _on_generation_layout(self) -> Iterator[None]:
        """Weights complete and where generation reads them; training's again afterwards."""
        actor, transition = self.models.actor, self.models.transition
        if actor.gathers_params:
            with self.timer.phase("param_gather"):
                actor.finish_param_gather()
        if transition.moves_weights:
            with self.timer.phase("resharding"):
                transition.to_generation()
        try:
            yield
        finally:
            transition.to_training()

    def _generate(
        self, prompts: list, *, n: int, temperature: float, first_request: int,
        first_index: int = 0,
    ) -> RolloutBatch | None:  # fmt: skip
        sampling = sampling_params(
            self.config, self.inputs.tokenizer, temperature=temperature, seed=self.config.seed
        )
        return collect(
            self.models.transition, self.inputs.tokenizer, prompts, n=n, sampling=sampling,
            first_request=first_request, first_index=first_index,
            block=prompts_per_block(self.config, self.groups.layout.dp),
        )  # fmt: skip

    def _reward(self, batch: RolloutBatch) -> None:
        """The learned model's scores, the function's, or both together."""
        learned = None
        if self.models.reward is not None:
            reader = self.inputs.reward_reader
            learned = learned_scores(batch, self.models.reward, reader, self.config)
        score(batch, self.inputs.reward, self.groups, learned)

    def _evaluate_policies(self, batch: RolloutBatch) -> None:
        """Log-probs of the actor and the reference, values of the critic."""
        config, models = self.config, self.models
        if needs_old_logprobs(config):
            with self.timer.phase("old_logprobs"):
                batch.tensors["old_logprobs"] = logprob_pass(batch, models.actor.model, config)
        if models.reference is not None:
            with self.timer.phase("ref_logprobs"):
                batch.tensors["ref_logprobs"] = logprob_pass(batch, models.reference, config)
        if models.critic is not None:
            with self.timer.phase("values"):
                if not self.critic_biased:
                    models.start_critic_at(batch.scores_B, self.groups)
                    self.critic_biased = True
                values, after = value_pass(batch, models.critic.model, config)
                batch.tensors["values"], batch.tensors["bootstrap"] = values, after

    def _update(self, batch: RolloutBatch) -> Updates:
        """Epochs of mini-batches for the critic and the actor."""
        config, algorithm, models = self.config, self.config.algorithm, self.models
        updates: Updates = {}
        jobs: list[tuple[str, Trainable, Any, str, Any]] = []
        if models.critic is not None:
            jobs.append(("critic", models.critic, critic_loss(config), "token_mean", None))
        if self.step_count >= algorithm.critic_warmup_steps:
            reference = models.reference if algorithm.kl.estimator == "full" else None
            loss = actor_loss(models.actor.model, config, self.kl.coef, reference)
            jobs.append(("actor", models.actor, loss, algorithm.loss_aggregation, reference))
        for role, trainable, loss, aggregation, reference in jobs:
            results, parts = [], []
            with self.timer.phase(f"update_{role}"):
                for _ in range(config.training.epochs):
                    for samples in mini_batches(batch, config):
                        result, sums = update_step(
                            trainable, batch, samples, config, loss, aggregation, reference
                        )
                        results.append(result)
                        parts.append(sums)
            updates[role] = results, add_metrics(parts)
        return updates

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_count, "samples_drawn": self.samples_drawn,
            "critic_biased": self.critic_biased,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count, self.samples_drawn = state["step"], state["samples_drawn"]
        self.critic_biased = state["critic_biased"]

    def _checkpoints(self) -> CheckpointManager:
        settings = self.config.checkpoint
        manager = CheckpointManager(
            self.config.checkpoint_dir, groups=self.groups, keep_last=settings.keep_last,
            keep_every=settings.keep_every, best_metric=settings.best_metric,
            async_save=settings.async_save, on_corrupt=settings.on_corrupt,
            config=self.config.to_dict(),
        )  # fmt: skip
        manager.add_trainable("actor", self.models.actor)
        if self.models.critic is not None:
            manager.add_trainable("critic", self.models.critic)
        manager.add_state("trainer", self)
        manager.add_state("kl", self.kl)
        manager.add_state("prompts", self.inputs.stream)
        manager.add_rank_state("rng", RngState())
        for trainable in (self.models.actor, self.models.critic):
            for index, part in enumerate(trainable.compression if trainable else []):
                name = f"{trainable.model.role}_gradient_compression_{index}"
                manager.add_rank_state(name, part)
        return manager

    def _resume(self) -> None:
        resume = self.config.checkpoint.resume
        if resume == "never":
            return
        step = self.checkpoints.load(None if resume == "auto" else Path(resume))
        if step is not None:
            log.info("resumed from step %d", step)
        for note in self.checkpoints.notes:
            log.warning("%s", note)

    def _save_if_due(self) -> None:
        every, step = self.config.checkpoint.save_interval, self.step_count
        stopping = self.runtime.stop_requested()
        last = step == self.config.training.steps
        if stopping or (every and step % every == 0) or (every and last):
            self.save()
        if stopping and not last:
            self.checkpoints.wait()
            raise StoppedBySignal(f"stopped after step {step}; the checkpoint is complete")

    def _explain(self, phase: str, error: BaseException) -> BaseException | None:
        return explain_out_of_memory(error, phase, self.config, self.models, self.runtime.device)


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
