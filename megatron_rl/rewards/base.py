"""Scoring a rollout: a Python function on one rank of each replica, a learned model, or both."""

from __future__ import annotations

import functools
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
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.stopping import StopNow, StopSignals

RewardFunction = Callable[..., list[float]]
_ARGUMENTS = ("prompts", "responses", "records")
_MODEL_SCORES = "model_scores"


def load_reward(
    spec: str, kwargs: dict[str, Any], *, with_model: bool = False
) -> RewardFunction:
    """Imports `module:function` or `file.py:function` and checks that it can be called.

    The function takes three lists of equal length — `prompts` (text), `responses` (text) and
    `records` (the JSON objects of the prompt file) — plus `reward.kwargs`, and returns one finite
    number per response. Beside a learned reward model (`with_model`) a parameter `model_scores`
    brings that model's scores, see `score`.

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
    return check_signature(function, spec, kwargs, with_model=with_model)


def check_signature(
    function: Callable, spec: str, kwargs: dict[str, Any], *, with_model: bool = False
) -> RewardFunction:
    """The function with `kwargs` bound, or a ConfigError that shows both signatures."""
    signature = inspect.signature(function)
    wants_scores = with_model and _MODEL_SCORES in signature.parameters
    arguments = (*_ARGUMENTS, _MODEL_SCORES) if wants_scores else _ARGUMENTS
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.function is {spec!r} with the signature {signature} ({error}); expected "
            f"({', '.join(_ARGUMENTS)}, **reward.kwargs)"
            + (f"; {_MODEL_SCORES} needs model.reward.path" if not with_model else ""),
            setting="reward.function",
        ) from error
    return functools.partial(function, **kwargs)


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


def score(
    batch: RolloutBatch, function: RewardFunction | None, groups: ParallelGroups,
    stop: StopSignals, model_scores_B: Tensor | None = None,
) -> None:  # fmt: skip
    """Sets `batch.scores_B` on all ranks of the replica.

    A function and a learned model add up; a function with a parameter `model_scores` gets the
    model's scores and returns the whole reward itself.

    One rank per replica calls the function, since it may be slow or random; the others wait for it,
    at most `runtime.collective_timeout`. An exception ends the run on all ranks; a stop signal ends
    the function where it is.

    Args:
        function: None: the learned model's score is the reward.
        model_scores_B: of the learned model, fp32 `[B]`, equal on all ranks of the replica.

    Raises:
        ValueError: if there is the wrong number of scores, or one that is not finite.
        StopNow: on all ranks of the replica, if the function was interrupted.
    """
    learned = None
    if model_scores_B is not None:
        learned = _checked(model_scores_B.tolist(), batch, "model.reward")
        batch.tensors["model_scores"] = model_scores_B
    if function is None:
        batch.scores_B = model_scores_B
        return
    if not len(batch):
        return
    combines = learned is not None and _MODEL_SCORES in inspect.signature(function).parameters
    control = groups.control()
    source = dist.get_process_group_ranks(groups.model)[0]
    scores = torch.zeros(len(batch), dtype=torch.float64)
    if dist.get_rank() == source:
        try:
            with stop.interruptible():
                values = function(
                    prompts=[p.text for p in batch.prompts], responses=batch.texts,
                    records=[p.record for p in batch.prompts],
                    **({_MODEL_SCORES: list(learned)} if combines else {}),
                )  # fmt: skip
            scores = torch.tensor(_checked(values, batch, "reward.function"), dtype=torch.float64)
        except StopNow:
            scores = torch.full_like(scores, math.nan)  # no score: those are finite
    dist.broadcast(scores, source, group=control)
    if scores.isnan().any():
        raise StopNow
    batch.scores_B = scores.float()
    if learned is not None and not combines:
        batch.scores_B = batch.scores_B + model_scores_B


def _checked(values: Any, batch: RolloutBatch, source: str) -> list[float]:
    values = [float(v) for v in values]
    if len(values) != len(batch):
        raise ValueError(
            f"{source} returned {len(values)} scores for {len(batch)} responses; it must "
            "return one number per response, in order"
        )
    bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    if bad is not None:
        raise ValueError(
            f"{source} returned {values[bad]} for the response {batch.texts[bad]!r}; "
            "scores must be finite numbers"
        )
    return values
