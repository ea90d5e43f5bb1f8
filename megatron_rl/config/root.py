"""The whole configuration of a run: reading it, checking it, writing it out."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from . import cross_checks, schema
from .algorithm import AlgorithmSettings
from .foreign_keys import translate
from .help_texts import annotated_yaml
from .model import ModelRole, ModelSettings, ParallelSettings, RoleParallel
from .not_yet import check_not_yet
from .operation import CheckpointSettings, CommTraceSettings, MonitorSettings, RuntimeSettings
from .placement import Place, place_of, ranks_apart
from .rollout import DataSettings, EvaluationSettings, RewardSettings, RolloutSettings
from .schema import SECTION, ConfigError, section, setting
from .training import HybridEngineSettings, TrainingSettings
from .yaml_reader import parse_yaml, read_yaml

Role = Literal["actor", "critic", "reference", "reward"]


@dataclass(**SECTION)
class Config:
    """Every setting of a run. Immutable, and checked as a whole when it is made."""

    seed: int = setting(0, at_least=0, below=2**31)
    """Seed of everything random: prompts' order, sampling, fresh heads."""
    run_dir: str = setting("runs/default", form=(r".+", "runs/my_run"))
    """Folder of the run: logs, metrics, checkpoints."""
    model: ModelSettings = section(ModelSettings)
    """The four models and their tokenizer."""
    parallel: ParallelSettings = section(ParallelSettings)
    """The layout over the ranks."""
    algorithm: AlgorithmSettings = section(AlgorithmSettings)
    """The reinforcement learning algorithm."""
    data: DataSettings = section(DataSettings)
    """The prompts."""
    rollout: RolloutSettings = section(RolloutSettings)
    """Generation of the responses."""
    reward: RewardSettings = section(RewardSettings)
    """The reward function."""
    training: TrainingSettings = section(TrainingSettings)
    """Optimizer steps and numerics."""
    hybrid_engine: HybridEngineSettings = section(HybridEngineSettings)
    """Between training and generation."""
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    """Saving and resuming."""
    evaluation: EvaluationSettings = section(EvaluationSettings)
    """Evaluation on held-out prompts."""
    monitor: MonitorSettings = section(MonitorSettings)
    """What is shown and written."""
    runtime: RuntimeSettings = section(RuntimeSettings)
    """Processes and devices."""
    comm_trace: CommTraceSettings = section(CommTraceSettings)
    """Trace of the communication."""

    def __post_init__(self) -> None:
        schema.check_tree(self)
        cross_checks.check_required(self)
        check_not_yet(self, default_value)
        cross_checks.check_all(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
        """The configuration in a YAML file, changed by ``section.key=value`` overrides.

        Raises:
            ConfigError: the file, an override or a setting is wrong. The message names the file
                and, for a setting that the file gives, its line.
        """
        values, lines = read_yaml(path)
        overridden = apply_overrides(values, overrides)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            if error.setting in overridden or error.setting not in lines:
                raise
            place = f"{error} ({path}, line {lines[error.setting]})"
            raise ConfigError(place, setting=error.setting) from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The configuration in nested dictionaries; what is missing takes its default.

        Keys that other trainers' files use for the same thing are understood (foreign_keys.py).
        """
        return schema.build(cls, translate(values), cls)

    def with_overrides(self, overrides: Iterable[str]) -> Config:
        """A copy changed by ``section.key=value`` overrides and checked again."""
        values = self.to_dict()
        apply_overrides(values, overrides)
        return self.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """All settings as nested dictionaries, defaults included."""
        return schema.to_plain(self)

    def to_yaml(self, *, with_help: bool = False) -> str:
        """All settings as YAML that ``load`` reads back to an equal configuration.

        Args:
            with_help: put each setting's help text above it as a comment.
        """
        if with_help:
            return annotated_yaml(self.to_dict(), Config, _Dumper)
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def value(self, dotted: str) -> Any:
        """The value of a dotted key."""
        return functools.reduce(getattr, dotted.split("."), self)

    def warnings(self) -> list[str]:
        """Sentences on settings that are allowed but seldom meant."""
        return cross_checks.warnings(self)

    def validate_world(self, world_size: int) -> int:
        """The data parallel size on ``world_size`` ranks.

        Raises:
            ConfigError: the layout or the batch sizes don't fit this many ranks.
        """
        return cross_checks.check_world(self, world_size)

    def role(self, name: Role) -> ModelRole:
        """The settings of one model."""
        return getattr(self.model, name)

    def role_path(self, name: Role) -> str | None:
        """Folder of one model's weights; critic and reference default to the actor's."""
        path = self.role(name).path
        return self.model.actor.path if path is None and name != "reward" else path

    def role_revision(self, name: Role) -> str | None:
        """Revision that belongs to ``role_path``."""
        inherits = self.role(name).path is None and name != "reward"
        return self.model.actor.revision if inherits else self.role(name).revision

    def role_parallel(self, name: Role) -> RoleParallel:
        """Layout of one model: its own, or the section `parallel`."""
        shared = self.parallel
        own = self.role(name).parallel
        return own or RoleParallel(tp=shared.tp, pp=shared.pp, vpp=shared.vpp, ep=shared.ep)

    @property
    def ranks_apart(self) -> dict[str, list[int]]:
        """Role to ranks, for the frozen models on ranks of their own."""
        return ranks_apart(self)

    def place_of(self, rank: int, world_size: int) -> Place:
        """Whether a rank trains or holds a frozen model, and with whom."""
        return place_of(self, rank, world_size)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.has_critic

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is kept."""
        return self.model.reference.enable

    @property
    def has_learned_reward(self) -> bool:
        """Whether a reward model scores the responses."""
        return self.model.reward.path is not None

    @property
    def samples_per_step(self) -> int:
        """Responses per training step over all replicas."""
        return self.rollout.batch_size * self.rollout.n

    @property
    def mini_batch_size(self) -> int:
        """Samples per optimizer step over all replicas."""
        return self.training.mini_batch_size or self.samples_per_step

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints."""
        return Path(self.checkpoint.dir or Path(self.run_dir) / "checkpoints")

    @property
    def comm_trace_dir(self) -> Path:
        """Folder of the communication trace."""
        return Path(self.comm_trace.dir or Path(self.run_dir) / "comm_trace")


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> set[str]:
    """Write ``section.key=value`` overrides into nested dictionaries; the last one wins.

    The value is read like YAML. A mapping is merged into its section.

    Returns:
        The dotted keys that were set.
    """
    done: set[str] = set()
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"override {override!r}: expected section.key=value; "
                "write it like training.steps=10."
            )
        value = parse_yaml(text, f"override {override!r}")
        _merge(values, functools.reduce(lambda inner, key: {key: inner}, reversed(keys), value))
        done.add(".".join(keys))
        done.update(_leaves(value, ".".join(keys)))
    return done


def default_value(dotted: str) -> Any:
    """The default of a dotted key."""
    first, *rest = dotted.split(".")
    field = Config.__dataclass_fields__[first]
    start = field.default_factory() if rest else field.default
    return functools.reduce(getattr, rest, start)


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(value: Any, prefix: str) -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return set().union(*(_leaves(inner, f"{prefix}.{key}") for key, inner in value.items()))


class _Dumper(yaml.SafeDumper):
    """Writes text that YAML 1.1 or 1.2 could mistake for something else in quotes."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    is_plain = value and parse_yaml(value, "") == value if _is_simple(value) else False
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


def _is_simple(value: str) -> bool:
    return all(character.isalnum() or character in "_-./" for character in value)


_Dumper.add_representer(str, _text)
