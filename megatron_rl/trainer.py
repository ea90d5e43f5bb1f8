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
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_rl.algorithms.kl import AdaptiveKL, FixedKL
from megatron_rl.checkpoint import RngState
from megatron_rl.config import Config
from megatron_rl.convert.huggingface import export_huggingface
from megatron_rl.engine.passes import logprob_pass, needs_old_logprobs, value_pass
from megatron_rl.engine.update import actor_loss, critic_loss
from megatron_rl.frozen.client import clients_of
from megatron_rl.learners import Learner, train_jointly, train_one_by_one
from megatron_rl.monitor.expert_metrics import expert_metrics
from megatron_rl.monitor.out_of_memory import explain_out_of_memory
from megatron_rl.monitor.phases import PhaseTimer
from megatron_rl.monitor.run_monitor import RunMonitor
from megatron_rl.monitor.summary import Updates
from megatron_rl.residency import Residency, check_host_memory
from megatron_rl.rewards.base import RewardFunction
from megatron_rl.rollout.advantages import estimate_advantages
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.exchange import computed_under
from megatron_rl.rollout_phase import RolloutPhase
from megatron_rl.run_inputs import RunInputs
from megatron_rl.runtime import Environment, Runtime, log
from megatron_rl.setup_checkpoints import build_checkpoints
from megatron_rl.setup_models import Models, build_models
from megatron_rl.stopping import StopNow, StoppedBySignal, put_back_on_stop


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
        config.place_of(env.rank, env.world_size).check_trains(env.rank)
        self.inputs = RunInputs.check(config, reward)
        self.runtime = Runtime(config, env)
        here = self.inputs.architectures_here
        check_host_memory(config, here, world_size=self.runtime.place.size)
        self.runtime.start(inputs_may_be_late=self.inputs.may_be_late)
        self.step_count, self.closed = 0, False
        self.timer = PhaseTimer(self.runtime.device)
        self.timer.on_error = self._explain
        self.runtime.watchdog.where = self._where
        self.models: Models | None = None
        with self.runtime.failures_told():
            self._build(env)

    def _build(self, env: Environment) -> None:
        """Models, checkpoints and the monitor; resumes."""
        config = self.config
        with self.timer.phase("startup"):
            self.models = build_models(config, self.inputs, self.runtime.place.size)
        engine = self.models.transition.engine
        engine.after_step = partial(self.runtime.stop.look, engine.model.groups.control())
        self.groups = self.models.actor.model.groups
        kl = config.algorithm.kl
        log.info(
            "rank %d of %d on %s, %s; tp %d dp %d pp %d of %s",
            env.rank, env.world_size, self.runtime.device, config.training.dtype,
            self.groups.tp_rank, self.groups.dp_rank, self.groups.pp_rank, self.groups.layout,
        )  # fmt: skip
        self.apart = clients_of(
            config, self.groups, self.runtime.store, reader=self.inputs.reward_reader
        )
        self.rollout = RolloutPhase(
            config, self.inputs, self.models, stop=self.runtime.stop, phase=self._phase,
            apart=self.apart,
        )  # fmt: skip
        self.kl: FixedKL | AdaptiveKL = FixedKL(kl.coef)
        if kl.adaptive.enable:
            self.kl = AdaptiveKL(kl.coef, target=kl.adaptive.target, horizon=kl.adaptive.horizon)
        self.critic_biased = False
        # Steps whose state is on disk (that of step 0 need not be) and that were evaluated.
        self.saved_step: int | None = 0
        self.evaluated_step: int | None = None
        self.last_metrics: dict[str, float] = {}
        states = {"trainer": self, "kl": self.kl, "prompts": self.inputs.stream}
        self.checkpoints = build_checkpoints(config, self.models, states)
        self.checkpoints.add_companions(self.inputs.companions)
        with self.timer.phase("startup"):
            self._resume()
        self.residency = Residency(config, self.models, self.runtime.device)
        self.residency.rest()
        self.monitor = RunMonitor(
            config, self.inputs.architectures_here, self.groups, self.timer,
            first_step=self.step_count,
        )  # fmt: skip

    # ---- the run -------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Runs to `training.steps` with evaluation and checkpoints.

        Returns:
            The last step's metrics, and the evaluations at both ends where they are on.

        Raises:
            StoppedBySignal: after SIGTERM or SIGUSR1, when the checkpoint is on disk.
        """
        config, metrics = self.config, self._evaluate_if_due()
        while self.step_count < config.training.steps:
            metrics |= self.step()
            self._save_if_due()
            metrics |= self._evaluate_if_due()
        if config.checkpoint.export_huggingface:
            self.export(Path(config.run_dir) / "huggingface")
        self.monitor.finish()
        return metrics

    def step(self) -> dict[str, float]:
        """One training step; see the module's first line.

        Returns:
            The metrics that are logged, equal on all ranks.

        Raises:
            StoppedBySignal: after SIGTERM or SIGUSR1 before the update; the state at the beginning
                of the step is on disk.
        """
        self.monitor.begin_step(self.step_count + 1)
        with self._may_be_left():
            batch, sampling = self.rollout.draw_step()
            with self.runtime.stop.section():
                self._evaluate_policies(batch)
        with self._phase("advantages"):
            estimate_advantages(
                batch, self.config, kl_coef=self.kl.coef, dp_group=self.groups.data_control()
            )
        with self.runtime.stop.finishes("an update"):
            updates = self._update(batch)
        self.step_count += 1
        metrics = self.monitor.end_step(
            self.step_count, batch, updates, kl_coef=self.kl.coef,
            more=sampling | expert_metrics(self.models.actor.model),
        )  # fmt: skip
        if "kl/ref_per_response" in metrics:
            self.kl.update(metrics["kl/ref_per_response"], self.config.samples_per_step)
        self.last_metrics = metrics
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out prompts (`data.eval`), sampled as `evaluation` says.

        Raises:
            StoppedBySignal: after SIGTERM or SIGUSR1, with the state on disk.
        """
        with self._may_be_left():
            metrics = self.rollout.evaluate()
        self.monitor.evaluation(self.step_count, metrics)
        self.evaluated_step = self.step_count
        if self.step_count:  # its checkpoint does not know of the evaluation yet
            self.saved_step = None
        return metrics

    def save(self) -> Path:
        """Writes a checkpoint of this step; resuming from it continues exactly."""
        with self._phase("checkpoint"), self.runtime.stop.finishes("a save"):
            path = self.checkpoints.save(self.step_count, metrics=self.last_metrics)
        self.saved_step = self.step_count
        return path

    def export(self, folder: str | Path) -> None:
        """Writes the actor as a Hugging Face folder."""
        with self.residency.on_device("actor"):
            export_huggingface(
                self.models.actor.model, folder, dtype=self.config.training.dtype,
                companions=self.inputs.companions,
            )  # fmt: skip
        dist.barrier()

    def close(self) -> None:
        """Finishes writers and pending saves and leaves the process group; safe to call twice.

        In the handling of an error, that error is the last thing in this rank's log.
        """
        error = sys.exc_info()[1]
        self.runtime.rank_log.write_failure(error)
        self.monitor.close()
        if not self.closed:
            self.closed = True
            # Waits for a background save; skipped after a crash, when other ranks may not answer.
            if error is None or isinstance(error, StoppedBySignal):
                self.checkpoints.close()
                if dist.get_rank() == 0:
                    for client in self.apart.values():
                        client.mailbox.end(stopped=error is not None)
        self.runtime.close()

    # ---- phases --------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A timed phase with what it needs on the device."""
        with self.timer.phase(name), self.residency.phase(name):
            yield

    def _evaluate_policies(self, batch: RolloutBatch) -> None:
        """Log-probs of the actor and the reference, values of the critic."""
        config, models = self.config, self.models
        if needs_old_logprobs(config):
            with self._phase("old_logprobs"):
                batch.tensors["old_logprobs"] = logprob_pass(batch, models.actor.model, config)
        self.runtime.stop.check()
        if "reference" in self.apart:
            with self._phase("ref_logprobs"):
                batch.tensors["ref_logprobs"] = self.apart["reference"].rows(batch)
        elif models.reference is not None:
            with self._phase("ref_logprobs"):
                (batch.tensors["ref_logprobs"],) = computed_under(
                    batch, self.groups, models.reference.groups,
                    lambda share: [logprob_pass(share, models.reference, config)],
                )  # fmt: skip
        self.runtime.stop.check()
        if models.critic is not None:
            with self._phase("values"):
                if not self.critic_biased:
                    with self.residency.on_device("critic_optimizer"):
                        models.start_critic_at(batch.scores_B, self.groups)
                    self.critic_biased = True
                critic = models.critic.model
                compute = partial(value_pass, model=critic, config=config)
                values = computed_under(batch, self.groups, critic.groups, compute)
                batch.tensors["values"], batch.tensors["bootstrap"] = values

    def _update(self, batch: RolloutBatch) -> Updates:
        """The critic learns and the actor learns."""
        config, models, learners = self.config, self.models, []
        if models.critic is not None:
            learners.append(
                Learner(role="critic", trainable=models.critic, loss=critic_loss(config),
                        aggregation="token_mean")  # fmt: skip
            )
        if self.step_count >= config.algorithm.critic_warmup_steps:
            reference = models.reference if config.algorithm.kl.estimator == "full" else None
            loss = actor_loss(models.actor.model, config, self.kl.coef, reference)
            learners.append(
                Learner(role="actor", trainable=models.actor, loss=loss, reference=reference,
                        aggregation=config.algorithm.loss_aggregation)  # fmt: skip
            )
        if models.embedding is not None and models.embedding.joint:
            critic, actor = learners
            return train_jointly(critic, actor, models.embedding, batch, config, self._phase)
        return train_one_by_one(learners, batch, self.groups, config, self._phase)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_count, "samples_drawn": self.rollout.samples_drawn,
            "critic_biased": self.critic_biased, "evaluated_step": self.evaluated_step,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count, self.rollout.samples_drawn = state["step"], state["samples_drawn"]
        self.critic_biased = state["critic_biased"]
        self.evaluated_step = state["evaluated_step"]

    def _resume(self) -> None:
        resume = self.config.checkpoint.resume
        if resume == "never":
            return
        step = self.checkpoints.load(None if resume == "auto" else Path(resume))
        if step is not None:
            self.saved_step = step if resume == "auto" else None
            log.info("resumed from step %d", step)
        for note in self.checkpoints.notes:
            log.warning("%s", note)

    def _save_if_due(self) -> None:
        every, step = self.config.checkpoint.save_interval, self.step_count
        if every and (step % every == 0 or step == self.config.training.steps):
            self.save()
        if step < self.config.training.steps and self.runtime.stop.agreed(
            self.runtime.stop.everyone
        ):
            self._stop()

    def _evaluate_if_due(self) -> dict[str, float]:
        """The evaluation that belongs to the steps done so far, if it was not made yet."""
        settings, step = self.config.evaluation, self.step_count
        if self.evaluated_step == step:
            return {}
        if step == 0:
            return self._evaluation_named("start") if settings.at_start else {}
        if step == self.config.training.steps:
            return self._evaluation_named("end") if settings.at_end else {}
        if settings.interval and step % settings.interval == 0:
            self.evaluate()
        return {}

    def _evaluation_named(self, when: str) -> dict[str, float]:
        return {f"{when}/{name}": value for name, value in self.evaluate().items()}

    # ---- stopping ------------------------------------------------------------------------------

    @contextmanager
    def _may_be_left(self) -> Iterator[None]:
        """Around work that changes nothing but a few small states: a stop in it puts those back,
        so that the next start does the same work again, bitwise, and ends the run."""
        try:
            with put_back_on_stop(self, self.inputs.stream, RngState()):
                yield
        except StopNow:
            self._stop()

    def _stop(self) -> NoReturn:
        """Saves what is not on disk yet, and ends the run on all ranks."""
        if self.saved_step != self.step_count:
            self.save()
        self.checkpoints.wait()
        raise StoppedBySignal(f"stopped after step {self.step_count}; its state is on disk")

    def _where(self) -> str:
        phase = self.timer.current or "between the phases"
        return f"step {self.step_count + 1}, {phase}"

    def _explain(self, phase: str, error: BaseException) -> BaseException | None:
        return explain_out_of_memory(error, phase, self.config, self.models, self.runtime.device)
