"""Which ranks train, and which hold a frozen model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .model import data_parallel_size
from .schema import refuse

if TYPE_CHECKING:
    from .root import Config

TRAINING = "training"
FROZEN_ROLES = ("reference", "reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks that work as one program, with a process group of their own.

    Attributes:
        name: "training", or the role of the frozen model.
        ranks: of the run, ascending.
        index: of this rank among them: its rank in that process group.
        alone: whether these are all ranks of the run.
    """

    name: str
    ranks: list[int]
    index: int
    alone: bool

    @property
    def size(self) -> int:
        return len(self.ranks)

    def check_trains(self, rank: int) -> None:
        """Raises a ConfigError where this rank holds a frozen model instead."""
        if self.name != TRAINING:
            rule = f"rank {rank} holds the {self.name} model and trains nothing"
            way_out = "call megatron_rl.serve_frozen_model(config) there, as train_ppo.py does"
            refuse(f"model.{self.name}.ranks", self.ranks, rule, way_out)


def ranks_apart(config: Config) -> dict[str, list[int]]:
    """Role → its ranks, for the frozen models that have ranks of their own."""
    given = {role: getattr(config.model, role).ranks for role in FROZEN_ROLES}
    return {role: sorted(ranks) for role, ranks in given.items() if ranks is not None}


def training_ranks(config: Config, world_size: int) -> list[int]:
    """All others."""
    taken = {rank for ranks in ranks_apart(config).values() for rank in ranks}
    return [rank for rank in range(world_size) if rank not in taken]


def place_of(config: Config, rank: int, world_size: int) -> Place:
    """Where `rank` works; the settings must have passed `check_ranks`."""
    apart = ranks_apart(config)
    places = apart | {TRAINING: training_ranks(config, world_size)}
    name = next(name for name, ranks in places.items() if rank in ranks)
    return Place(
        name=name, ranks=places[name], index=places[name].index(rank), alone=not apart
    )


def check_placement(config: Config) -> None:
    """Rules on `model.<role>.ranks` that need no world size."""
    taken: dict[int, str] = {}
    for role, ranks in ranks_apart(config).items():
        dotted = f"model.{role}.ranks"
        if not ranks or len(set(ranks)) < len(ranks):
            rule = "must name at least one rank, and none twice"
            refuse(dotted, ranks, rule, "name ranks, or remove it")
        if 0 in ranks:
            rule = "rank 0 trains: it writes metrics and checkpoints"
            refuse(dotted, ranks, rule, "name other ranks")
        for rank in ranks:
            if rank in taken:
                rule = f"rank {rank} holds the {taken[rank]} already"
                refuse(dotted, ranks, rule, "name other ranks: each holds one frozen model")
            taken[rank] = role
        if getattr(config.hybrid_engine, f"{role}_offload").enable:
            rule = f"nothing else needs the memory of the ranks in {dotted}"
            refuse(f"hybrid_engine.{role}_offload.enable", True, rule, "remove it")
    compression = config.training.gradient_compression
    if taken and compression.enable and compression.hierarchical:
        rule = "takes every node to train as a whole, and frozen models have ranks of their own"
        way_out = "set it to false, or remove model.reference.ranks and model.reward.ranks"
        refuse("training.gradient_compression.hierarchical", True, rule, way_out)
    if "reference" in ranks_apart(config) and config.algorithm.kl.estimator == "full":
        rule = "whole distributions do not travel: the reference must be on the actor's ranks"
        way_out = "remove model.reference.ranks, or use algorithm.kl.estimator=k3"
        refuse("algorithm.kl.estimator", "full", rule, way_out)


def check_ranks(config: Config, world_size: int) -> int:
    """Refuses ranks that do not exist and sizes that do not divide.

    Returns:
        The number of ranks that train.
    """
    for role, ranks in ranks_apart(config).items():
        dotted = f"model.{role}.ranks"
        absent = [rank for rank in ranks if rank >= world_size]
        if absent:
            rule = f"there is no rank {absent[0]} among the {world_size} of this run"
            fitting = f"use ranks from 1 to {world_size - 1} or " if world_size > 1 else ""
            refuse(dotted, ranks, rule, f"{fitting}start more")
        own = config.role_parallel(role)
        data_parallel_size(
            own.tp, own.pp, len(ranks), prefix=f"model.{role}.parallel", whose=f"in {dotted}"
        )
    return len(training_ranks(config, world_size))

