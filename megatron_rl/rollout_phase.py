"""The first half of a step: prompts become scored samples. Evaluation is the same on other prompts.

Generation and scoring change nothing but the prompt stream's place and the count of samples, so a
stop may leave them at any point (see stopping.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from megatron_rl.config import Config
from megatron_rl.frozen.client import FrozenClient
from megatron_rl.generation.sequence import Response
from megatron_rl.models.flops import sample_flops
from megatron_rl.monitor.summary import EvaluationResult
from megatron_rl.parallel import ParallelGroups
from megatron_rl.resharding.transition import on_generation_layout
from megatron_rl.rewards.base import score
from megatron_rl.rewards.model import learned_scores
from megatron_rl.rollout.batch import RolloutBatch, make_batch
from megatron_rl.rollout.collect import collect, prompts_per_block, sampling_params
from megatron_rl.rollout.dynamic_sampling import fill_batch
from megatron_rl.rollout.exchange import balance, computed_under
from megatron_rl.rollout.prompts import Prompt
from megatron_rl.run_inputs import RunInputs
from megatron_rl.setup_models import Models
from megatron_rl.stopping import StopSignals

EVALUATION_REQUESTS = 2**40  # evaluation draws its noise far from training's


class RolloutPhase:
    """Draws samples from the prompts of a run.

    Args:
        phase: a timed phase, by name, with what it needs on the device.
        apart: role → frozen model on ranks of its own.

    Attributes:
        samples_drawn: in the run so far. It numbers the requests, whose noise it keys.
    """

    def __init__(
        self, config: Config, inputs: RunInputs, models: Models, *, stop: StopSignals,
        phase: Callable[[str], AbstractContextManager[None]], apart: dict[str, FrozenClient],
    ) -> None:  # fmt: skip
        self.config, self.inputs, self.models = config, inputs, models
        self.stop, self.phase, self.apart = stop, phase, apart
        self.groups: ParallelGroups = models.actor.model.groups
        self.samples_drawn = 0
        self._batches = 0  # in this process: names the work lists

    def draw_step(self) -> tuple[RolloutBatch, dict[str, float]]:
        """Generated and scored samples of a step, spread over the replicas by cost, and metrics."""
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

    def evaluate(self) -> dict[str, float]:
        """Mean reward on the held-out prompts; equal on all ranks."""
        config, prompts = self.config, self.inputs.eval_prompts()
        size = config.evaluation.batch_size or len(prompts)
        total = EvaluationResult()
        with self.on_generation_layout(), self.phase("evaluation"):
            for first in range(0, len(prompts), size):
                with self.stop.section():
                    batch = self.generate(
                        prompts[first : first + size], n=1,
                        temperature=config.evaluation.temperature,
                        first_request=EVALUATION_REQUESTS + first, roles=("reward",),
                    )  # fmt: skip
                    self._reward(batch)
                    total.add(batch)
        return total.reduce(self.groups)

    def on_generation_layout(self) -> AbstractContextManager[None]:
        """The actor's weights where generation wants them, and back."""
        return on_generation_layout(self.models.actor, self.models.transition, self.phase)

    def generate(
        self, prompts: list[Prompt], *, n: int, temperature: float, first_request: int,
        first_index: int = 0, roles: Sequence[str] = ("reward", "reference"),
    ) -> RolloutBatch:  # fmt: skip
        """This replica's samples, not scored yet; see `rollout.collect.collect`.

        Args:
            roles: frozen models that get each sample as soon as it is complete, if they are on
                ranks of their own.
        """
        sampling = sampling_params(
            self.config, self.inputs.tokenizer, temperature=temperature, seed=self.config.seed
        )
        self._batches += 1
        # Who takes a prompt from a work list depends on time, and so do the last bits of a batch.
        work_list = None if self.config.training.deterministic else self._batches
        clients = [c for role, c in self.apart.items() if role in roles and c.streams]
        with self._sent_to(clients, prompts, n=n, first_request=first_request):
            return collect(
                self.models.transition, self.inputs.tokenizer, prompts, n=n, sampling=sampling,
                first_request=first_request, first_index=first_index,
                block=prompts_per_block(self.config, self.groups.layout.dp), work_list=work_list,
            )  # fmt: skip

    @contextmanager
    def _sent_to(
        self, clients: list[FrozenClient], prompts: list[Prompt], *, n: int, first_request: int
    ) -> Iterator[None]:
        """Completed responses go to `clients`, sent by one rank of the replica that generates."""
        engine, tokenizer = self.models.engine, self.inputs.tokenizer

        def send(responses: list[Response]) -> None:
            numbers = [r.request - first_request for r in responses]
            texts = [tokenizer.decode(r.token_ids) for r in responses]
            batch = make_batch([prompts[k // n] for k in numbers], responses, texts, numbers, n)
            for client in clients:
                client.send(batch)

        if clients and engine.model.groups.control().rank() == 0:
            engine.on_responses = send
        try:
            yield
        finally:
            engine.on_responses = None

    def _draw(self, first_index: int = 0) -> RolloutBatch:
        """Samples for the next `rollout.batch_size` prompts, with their scores."""
        config = self.config
        prompts = self.inputs.stream.take(config.rollout.batch_size)
        with self.stop.section(), self.on_generation_layout(), self.phase("generation"):
            batch = self.generate(
                prompts, n=config.rollout.n, temperature=config.rollout.temperature,
                first_request=self.samples_drawn, first_index=first_index,
            )  # fmt: skip
        self.samples_drawn += config.samples_per_step
        with self.stop.section(), self.phase("scoring"):
            self._reward(batch)
        return batch

    def _reward(self, batch: RolloutBatch) -> None:
        """The learned model's scores, the function's, or both together."""
        learned, model = None, self.models.reward
        if "reward" in self.apart:
            learned = self.apart["reward"].numbers(batch)
        elif model is not None:
            (learned,) = computed_under(
                batch, self.groups, model.groups,
                lambda share: [
                    learned_scores(share, model, self.inputs.reward_reader, self.config)
                ],
            )  # fmt: skip
        score(batch, self.inputs.reward, self.groups, self.stop, learned)
