"""Rules between settings: each is a pure function that refuses with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .execution_checks import check_execution, nearest_multiples
from .learning_checks import check_learning
from .model import data_parallel_size
from .placement import check_placement, check_ranks, ranks_apart
from .schema import refuse

if TYPE_CHECKING:
    from .root import Config


def check_required(config: Config) -> None:
    """Settings without which no run can start."""
    if not config.model.actor.path:
        way_out = "give the folder of the policy to train"
        refuse("model.actor.path", config.model.actor.path, "is required", way_out)
    if not config.data.train:
        way_out = "give a JSONL or Parquet file with one prompt per row"
        refuse("data.train", config.data.train, "is required", way_out)


def check_all(config: Config) -> None:
    """Every rule that needs no world size."""
    check_execution(config)
    check_placement(config)
    check_learning(config)


def warnings(config: Config) -> list[str]:
    """Sentences on settings that are allowed but seldom meant."""
    found = []
    kl, training = config.algorithm.kl, config.training
    if kl.placement == "loss" and kl.estimator == "k1":
        found.append(
            "algorithm.kl.estimator = k1 as a loss has an expected gradient of zero: "
            "it does not hold the policy back; use k2 or k3 with placement loss."
        )
    if config.rollout.temperature == 0:
        found.append("rollout.temperature = 0 is greedy: training sees no exploration.")
    if config.has_reference and kl.placement == "none":
        found.append(
            "algorithm.kl.placement = none: the reference model is kept for the KL metric only; "
            "set model.reference.enable=false to save its memory."
        )
    if training.dtype == "fp16":
        found.append("training.dtype = fp16 overflows easily in RL; bf16 is safer.")
    return found


def check_world(config: Config, world_size: int) -> int:
    """The data parallel size; refuses layouts and batches that don't fit ``world_size`` ranks."""
    parallel, apart = config.parallel, ranks_apart(config)
    world_size = check_ranks(config, world_size)
    whose = "that train" if apart else "of this run"
    dp = data_parallel_size(parallel.tp, parallel.pp, world_size, prefix="parallel", whose=whose)
    for role in ("critic", "reference", "reward"):
        own = config.role(role).parallel
        if own is not None and role not in apart:
            prefix = f"model.{role}.parallel"
            replicas = data_parallel_size(
                own.tp, own.pp, world_size, prefix=prefix, whose=whose
            )
            if replicas > config.samples_per_step:
                rule = f"makes {replicas} replicas of the {role}, more than a step has samples"
                way_out = f"set rollout.batch_size*rollout.n to at least {replicas}"
                refuse(prefix, own, rule, way_out)
    batches = {"rollout.batch_size": config.rollout.batch_size}
    if config.training.mini_batch_size is not None:
        batches["training.mini_batch_size"] = config.training.mini_batch_size
    for dotted, size in batches.items():
        if size % dp:
            rule = f"must be a multiple of the {dp} data parallel replicas on {world_size} ranks"
            refuse(dotted, size, rule, f"use {nearest_multiples(size, dp)}")
    absent = [rank for rank in config.monitor.profile.ranks if rank >= world_size]
    if config.monitor.profile.steps and absent:
        rule = f"there are {world_size} ranks {whose}, numbered from 0"
        refuse("monitor.profile.ranks", absent[0], rule, f"use ranks below {world_size}")
    return dp
