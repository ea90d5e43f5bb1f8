"""Scoring a rollout with a Python function, on one rank of each replica."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import ConfigError
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch

RewardFunction = Callable[..., list[float]]
_ARGUMENTS = ("prompts", "responses", "records")


def load_reward(spec: str, kwargs: dict[str, Any]) -> RewardFunction:
    """Imports `module:function` or `file.py:function` and checks that it can be called.

    The function takes three lists of equal length — `prompts` (text), `responses` (text) and
    `records` (the JSON objects of the prompt file) — plus `reward.kwargs`, and returns one finite
    number per response.

    Raises:
        ConfigError: naming what can't be imported, or the signature found and the one expected.
    """
    module_name, _, name = spec.rpartition(":")
    try:
        module = _import(module_name)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when imported
        raise ConfigError(
            f"reward.function is {spec!r}: {module_name!r} can't be imported "
            f"({type(error).__name__}: {error}); give module:function or path/to/file.py:function",
            setting="reward.function",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"reward.function is {spec!r}: {module_name!r} has no function {name!r}",
            setting="reward.function",
        )
    return check_signature(function, spec, kwargs)


def check_signature(function: Callable, spec: str, kwargs: dict[str, Any]) -> RewardFunction:
    """The function with `kwargs` bound, or a ConfigError that shows both signatures."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS), **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.function is {spec!r} with the signature {signature} ({error}); expected "
            f"({', '.join(_ARGUMENTS)}, **reward.kwargs)",
            setting="reward.function",
        ) from error
    return lambda **arguments: function(**arguments, **kwargs)


def _import(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or not Path(name).is_file():
        raise FileNotFoundError(f"no file {name!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def score(batch: RolloutBatch, function: RewardFunction, groups: ParallelGroups) -> None:
    """Sets `batch.scores_B` on all ranks of the replica.

    One rank per replica calls the function, since it may be slow or random; the others wait in the
    control group, whose timeout is far beyond any reward's. An exception ends the run on all ranks.

    Raises:
        ValueError: if the function returns the wrong number of scores, or one that is not finite.
    """
    control = groups.control()
    source = dist.get_process_group_ranks(groups.model)[0]
    scores = torch.zeros(len(batch), dtype=torch.float64)
    if dist.get_rank() == source:
        values = function(
            prompts=[p.text for p in batch.prompts], responses=batch.texts,
            records=[p.record for p in batch.prompts],
        )  # fmt: skip
        scores = torch.tensor(_checked(values, batch), dtype=torch.float64)
    dist.broadcast(scores, source, group=control)
    batch.scores_B = scores.float()


def _checked(values: Any, batch: RolloutBatch) -> list[float]:
    values = [float(v) for v in values]
    if len(values) != len(batch):
        raise ValueError(
            f"reward.function returned {len(values)} scores for {len(batch)} responses; it must "
            "return one number per response, in order"
        )
    bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    if bad is not None:
        raise ValueError(
            f"reward.function returned {values[bad]} for the response {batch.texts[bad]!r}; "
            "scores must be finite numbers"
        )
    return values
