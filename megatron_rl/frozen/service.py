"""What the ranks of `model.reward.ranks` or `model.reference.ranks` do: score what they are sent.

They are one program with a process group of its own, and know nothing of the training but the
samples in their mailbox. Whatever has arrived is one batch, spread over the model's replicas. A
failure on either side ends the whole run: one watchdog looks after all ranks.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.engine.passes import logprob_pass
from megatron_rl.frozen.mailbox import Delivery, Mailbox, Sample
from megatron_rl.generation.sequence import Response
from megatron_rl.models.gpt import ParallelModel
from megatron_rl.rewards.base import RewardFunction
from megatron_rl.rewards.model import scores_of
from megatron_rl.rollout.batch import make_batch
from megatron_rl.rollout.prompts import Prompt
from megatron_rl.run_inputs import RunInputs
from megatron_rl.runtime import Environment, Runtime, log
from megatron_rl.setup_models import build_frozen
from megatron_rl.stopping import StoppedBySignal

# Ranks that wait for the leader's next look must not wait longer than a collective may take.
LOOK_SECONDS = 5.0


def serve_frozen_model(config: Config, reward: RewardFunction | None = None) -> None:
    """Holds a frozen model until the training ends.

    To be called in place of `Trainer` on the ranks that `config` names for the model.

    Args:
        reward: as given to `Trainer` on the other ranks.

    Raises:
        ConfigError: for wrong input, as `Trainer` does.
        StoppedBySignal: the training was stopped by a signal.
    """
    env = Environment.read()
    config.validate_world(env.world_size)
    inputs = RunInputs.check(config, reward)
    runtime = Runtime(config, env)
    runtime.start(inputs_may_be_late=inputs.may_be_late)
    try:
        with runtime.failures_told():
            service = FrozenService(config, inputs, runtime)
            end = service.run()
        if end == "stopped":
            raise StoppedBySignal(f"the {service.role} model's ranks stopped with the training")
    finally:
        runtime.close()


class FrozenService:
    """One frozen model and the loop around it."""

    def __init__(self, config: Config, inputs: RunInputs, runtime: Runtime) -> None:
        self.config, self.runtime, self.role = config, runtime, runtime.place.name
        self.model = build_frozen(config, inputs, self.role, runtime.place.size)
        self.groups = self.model.groups
        self.mailbox = Mailbox(
            runtime.store, self.role, patience=config.runtime.collective_timeout
        )
        log.info("holds the %s model alone: %s", self.role, self.groups.layout)

    def run(self) -> str:
        """Works until the training has ended; says how it ended."""
        scored = 0
        while True:
            delivery = self._next()
            self._score(delivery.samples)
            scored += len(delivery.samples)
            if delivery.end is not None:
                if dist.get_rank() == 0:
                    log.info("scored %d samples of %d messages", scored, self.mailbox.taken)
                return delivery.end

    def _next(self) -> Delivery:
        """What has arrived, the same on all ranks of the model."""
        watchdog, everyone = self.runtime.watchdog, self.runtime.stop.everyone
        watchdog.where = lambda: f"the {self.role} model's wait for samples"
        shared: list = [None]
        with watchdog.waits_for_work():
            if dist.get_rank() == 0:
                shared = [self.mailbox.take(LOOK_SECONDS)]
            dist.broadcast_object_list(shared, 0, group=everyone)
        watchdog.where = lambda: f"the {self.role} model's forward pass"
        return shared[0]

    def _score(self, samples: Sequence[Sample]) -> None:
        """Every dp-th sample on each replica; one of its ranks answers."""
        share = samples[self.groups.dp_rank :: self.groups.layout.dp]
        if not share:
            return
        results = _results(self.role, self.model, share, self.config)
        if self.groups.control().rank() == 0:
            for sample, values in zip(share, results, strict=True):
                self.mailbox.answer(sample.request, values)


def _results(
    role: str, model: ParallelModel, samples: Sequence[Sample], config: Config
) -> list[list[float]]:
    """One number per sample of a reward model, one per response token of a reference."""
    if role == "reward":
        sequences = [torch.tensor(sample.tokens) for sample in samples]
        return [[score] for score in scores_of(sequences, model, config).tolist()]
    prompts = [Prompt(index=s.request, text="", token_ids=[], record={}) for s in samples]
    responses = [
        Response(
            request=s.request, prompt_ids=s.tokens[: s.prompt_length],
            token_ids=s.tokens[s.prompt_length :], full_logprobs=[], finish_reason="stop",
            logprobs=[0.0] * (len(s.tokens) - s.prompt_length),
        )
        for s in samples
    ]  # fmt: skip
    count = len(samples)
    batch = make_batch(prompts, responses, [""] * count, list(range(count)))
    logprobs_BR = logprob_pass(batch, model, config).tolist()
    pairs = zip(logprobs_BR, batch.response_lengths, strict=True)
    return [row[:length] for row, length in pairs]
