"""From training to generation and back.

  zero_repartitioning   generation reads the training parameters where they are: nothing moves
  micro_dp              a generation model of a smaller layout is filled from the training shards
                        before each rollout, and its memory is given back after it

Both answer `generate` for the samples of one *training* replica, so that everything after the
rollout is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from megatron_rl.generation.engine import Engine, EngineSettings
from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.models.gpt import ParallelModel, build_model
from megatron_rl.parallel import Layout, ParallelGroups
from megatron_rl.resharding.arena import ALIGNMENT
from megatron_rl.resharding.execute import Resharder, new_exchange_group
from megatron_rl.resharding.grid import generation_grid
from megatron_rl.resharding.model_specs import grid_of, model_specs, weights_by_spec
from megatron_rl.resharding.plan import Plan, make_plan
from megatron_rl.resharding.scatter import generate_scattered
from megatron_rl.runtime import log

Decode = Callable[[list[int]], str]


class Transition(Protocol):
    """How a run goes from training to generation and back.

    Attributes:
        engine: what generates on this rank.
        groups: of the training replica whose samples `generate` is asked for.
        moves_weights: whether `to_generation` does anything.
    """

    engine: Engine
    groups: ParallelGroups
    moves_weights: bool

    def to_generation(self) -> None: ...
    def to_training(self) -> None: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams],
        *, requests: Sequence[int],
    ) -> list[Response]: ...  # fmt: skip


class Gathering(Protocol):
    """A trained model whose updated weights may still have to be gathered."""

    @property
    def gathers_params(self) -> bool: ...
    def finish_param_gather(self) -> None: ...


@contextmanager
def on_generation_layout(
    actor: Gathering, transition: Transition,
    phase: Callable[[str], AbstractContextManager[None]],
) -> Iterator[None]:  # fmt: skip
    """Weights complete and where generation reads them; training's again afterwards.

    Args:
        phase: times what happens, by name.
    """
    if actor.gathers_params:
        with phase("param_gather"):
            actor.finish_param_gather()
    if transition.moves_weights:
        with phase("resharding"):
            transition.to_generation()
    try:
        yield
    finally:
        transition.to_training()


class ZeroRepartitioning:
    """Generation on the training parameters themselves."""

    moves_weights = False

    def __init__(
        self, model: ParallelModel, settings: EngineSettings, decode: Decode | None = None
    ) -> None:
        self.engine, self.groups = Engine(model, settings, decode), model.groups

    def to_generation(self) -> None:
        """The parameters are where generation reads them."""

    def to_training(self) -> None:
        """Generation has changed nothing."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams],
        *, requests: Sequence[int],
    ) -> list[Response]:  # fmt: skip
        return self.engine.generate(prompts, sampling, requests=requests)


class MicroDP:
    """Generation on a smaller layout, by several replicas inside each training replica.

    Args:
        model: the trained model; its weights must be complete at `to_generation`.
        layout: from `Layout.generation_layout` of the model's.
        dtype, backend: as the model was built (`build_model`).
        keep: hold the memory of gathered weights between rollouts.
        decode: ids → text, for stop texts.

    Raises:
        ValueError: for a tensor that can't be cut for the generation layout (named).
    """

    moves_weights = True

    def __init__(
        self, model: ParallelModel, layout: Layout, settings: EngineSettings, *, dtype: str,
        backend: str = "auto", keep: bool = False, decode: Decode | None = None,
    ) -> None:  # fmt: skip
        self.groups, self._logged = model.groups, False
        train = model.groups.layout
        self.plan = _plan(model, layout, dtype)
        groups = ParallelGroups(layout=layout)
        arch = replace(model.arch, padded_for=train.tp)
        self.model = build_model(
            "actor", arch, groups, dtype=dtype, backend=backend, window=model.config.window,
            fp32_logits=model.config.fp32_logits,
        )  # fmt: skip
        self._parameters = weights_by_spec(self.model, self.plan.specs)
        self._check_shapes()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self.resharder = Resharder(
            self.plan, dist.get_rank(), weights_by_spec(model, self.plan.specs),
            new_exchange_group(self.plan), keep=keep,
        )  # fmt: skip
        self.resharder.release()
        self.engine = Engine(self.model, settings, decode)

    def _check_shapes(self) -> None:
        for index, spec in enumerate(self.plan.specs):
            planned = self.plan.generation_shape(dist.get_rank(), index)
            built = self._parameters.get(spec.name)
            built = None if built is None else tuple(built.shape)
            assert planned == built, f"{spec.name}: planned {planned}, the model has {built}"

    def to_generation(self) -> None:
        """Fills the generation model from the training shards; every byte is counted."""
        before = self.resharder.traffic.received_bytes
        weights = self.resharder.gather()
        for name, parameter in self._parameters.items():
            parameter.data = weights[name].data
        received = self.resharder.traffic.received_bytes - before
        planned = self.plan.received_bytes(dist.get_rank())
        assert received == planned, f"received {received} bytes, the plan has {planned}"
        allowed = self.plan.generation_bytes(dist.get_rank()) + ALIGNMENT * len(weights)
        assert self.extra_bytes <= allowed, f"{self.extra_bytes} bytes held, allowed {allowed}"
        if not self._logged:
            self._logged = True
            log.info(
                "micro_dp: tp %d pp %d, %d replicas inside each training replica; received %d "
                "bytes, %d bytes beyond the training weights, %d of staging, %d buckets",
                self.engine.model.groups.layout.tp, self.engine.model.groups.layout.pp,
                self.engine.model.groups.layout.inner_replicas, received, self.extra_bytes,
                self.resharder.staging_bytes, self.plan.num_buckets,
            )  # fmt: skip

    @property
    def extra_bytes(self) -> int:
        """Bytes of generation weights beyond the training weights, held at this moment."""
        return self.resharder.extra_bytes

    def to_training(self) -> None:
        """Gives the memory of gathered weights back, unless it is kept."""
        self.resharder.release()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams],
        *, requests: Sequence[int],
    ) -> list[Response]:  # fmt: skip
        return generate_scattered(self.engine, prompts, sampling, requests=requests)


def _plan(model: ParallelModel, layout: Layout, dtype: str) -> Plan:
    """The plan of this rank's training replica."""
    groups = model.groups
    train = grid_of(groups.layout)
    gen = generation_grid(train, tp=layout.tp, pp=layout.pp, num_layers=model.arch.layers)
    specs = model_specs(model.arch, tp=groups.layout.tp, dtype=dtype)
    return make_plan(specs, train, gen, replica=groups.dp_rank)
