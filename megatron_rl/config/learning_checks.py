"""Rules between the settings of what is learned: algorithm, rollout, batches, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .algorithm import AlgorithmSettings
from .model import ModelRole
from .schema import changed, refuse, refuse_idle_options
from .training import OffloadSettings, TrainingSettings

if TYPE_CHECKING:
    from .root import Config


def check_learning(config: Config) -> None:
    """Refuse settings of algorithm, rollout, batches and evaluation that contradict each other."""
    for check in (
        _check_critic_options, _check_groups, _check_algorithm, _check_kl, _check_lengths,
        _check_batches, _check_evaluation,
    ):  # fmt: skip
        check(config)


def _check_critic_options(config: Config) -> None:
    if config.has_critic:
        return
    rule = f"there is no critic with algorithm.name={config.algorithm.name}"
    way_out = "remove it or use algorithm.name=ppo"
    algorithm, usual = config.algorithm, AlgorithmSettings()
    options = ["value_clip", "critic_warmup_steps"]
    if algorithm.advantage_function is None:
        options += ["lam", "lam_length_adaptive", "lam_length_constant"]
    for option in options:
        value = getattr(algorithm, option)
        if value != getattr(usual, option):
            refuse(f"algorithm.{option}", value, rule, way_out)
    for settings, default, prefix in (
        (config.model.critic, ModelRole(), "model.critic"),
        (config.training.critic, TrainingSettings().critic, "training.critic"),
        (config.hybrid_engine.critic_offload, OffloadSettings(), "hybrid_engine.critic_offload"),
    ):
        for dotted, value in changed(settings, default, prefix):
            refuse(dotted, value, rule, way_out)
    share = config.hybrid_engine.share_embeddings
    if share is not False:
        refuse("hybrid_engine.share_embeddings", share, rule, way_out)


def _check_groups(config: Config) -> None:
    algorithm, n = config.algorithm, config.rollout.n
    if algorithm.needs_groups and n == 1:
        rule = f"algorithm.name={algorithm.name} compares the responses of one prompt"
        refuse("rollout.n", n, rule, "set rollout.n to 2 or more, or use algorithm.name=ppo")
    if algorithm.needs_groups and config.rollout.temperature == 0:
        rule = f"greedy responses of one prompt are equal, and {algorithm.name} compares them"
        refuse("rollout.temperature", 0.0, rule, "set rollout.temperature > 0")
    if algorithm.dynamic_sampling.enable and n == 1:
        rule = "dynamic sampling looks at the responses of one prompt, and rollout.n is 1"
        way_out = "set rollout.n to 2 or more, or disable dynamic sampling"
        refuse("algorithm.dynamic_sampling.enable", True, rule, way_out)
    if algorithm.advantage_std != "sample" and algorithm.name != "grpo":
        rule = f"only grpo divides by a group's deviation, and algorithm.name={algorithm.name}"
        way_out = "remove the setting or use algorithm.name=grpo"
        refuse("algorithm.advantage_std", algorithm.advantage_std, rule, way_out)
    own_estimator = algorithm.advantage_function is not None
    if algorithm.name in ("grpo", "rloo") and algorithm.gamma != 1 and not own_estimator:
        rule = f"{algorithm.name} gives one advantage to a whole response and discounts nothing"
        refuse("algorithm.gamma", algorithm.gamma, rule, "remove it or use algorithm.name=ppo")
    if algorithm.name.startswith("reinforce") and not algorithm.whiten_advantages:
        rule = f"whitening is part of {algorithm.name}"
        way_out = "remove it or use algorithm.name=rloo"
        refuse("algorithm.whiten_advantages", False, rule, way_out)


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    is_constant = algorithm.loss_aggregation == "constant"
    if is_constant and algorithm.loss_constant is None:
        rule = "is required when algorithm.loss_aggregation=constant"
        refuse("algorithm.loss_constant", None, rule, "give the number to divide by")
    if not is_constant and algorithm.loss_constant is not None:
        rule = f"has no effect with algorithm.loss_aggregation={algorithm.loss_aggregation}"
        way_out = "remove it or set algorithm.loss_aggregation=constant"
        refuse("algorithm.loss_constant", algorithm.loss_constant, rule, way_out)
    if algorithm.critic_warmup_steps >= config.training.steps:
        rule = f"the actor would not train in the {config.training.steps} steps of the run"
        way_out = f"use less than training.steps={config.training.steps}"
        refuse("algorithm.critic_warmup_steps", algorithm.critic_warmup_steps, rule, way_out)
    overlong = algorithm.overlong
    limit = overlong.max_length or config.rollout.max_new_tokens
    if overlong.enable and overlong.buffer > limit:
        rule = f"is larger than the response limit of {limit} tokens"
        refuse("algorithm.overlong.buffer", overlong.buffer, rule, f"use at most {limit}")
    refuse_idle_options(overlong, "algorithm.overlong", independent="filter")
    refuse_idle_options(algorithm.dynamic_sampling, "algorithm.dynamic_sampling")
    refuse_idle_options(algorithm.importance_sampling, "algorithm.importance_sampling")
    refuse_idle_options(algorithm.kl.adaptive, "algorithm.kl.adaptive")


def _check_kl(config: Config) -> None:
    kl = config.algorithm.kl
    if kl.estimator == "full":
        _check_full_kl(config)
    if kl.placement == "none":
        way_out = "set algorithm.kl.placement=reward or loss, or remove it"
        if kl.coef > 0:
            refuse("algorithm.kl.coef", kl.coef,
                   "has no effect with algorithm.kl.placement=none", way_out)  # fmt: skip
        if kl.adaptive.enable:
            refuse("algorithm.kl.adaptive.enable", True,
                   "there is no coefficient with algorithm.kl.placement=none", way_out)  # fmt: skip
        return
    if not config.has_reference:
        rule = "the KL needs a reference model, and model.reference.enable is false"
        way_out = "set model.reference.enable=true or algorithm.kl.placement=none"
        refuse("algorithm.kl.placement", kl.placement, rule, way_out)
    if kl.adaptive.enable and kl.coef == 0:
        rule = "an adaptive coefficient is multiplied in each step and can't leave 0"
        refuse("algorithm.kl.coef", kl.coef, rule, "start from a value > 0, such as 0.2")


def _check_full_kl(config: Config) -> None:
    placement, rollout = config.algorithm.kl.placement, config.rollout
    way_out = "set algorithm.kl.placement=loss, or algorithm.kl.estimator=k1"
    if placement == "none":
        rule = "only a loss compares whole distributions, and algorithm.kl.placement=none"
        refuse("algorithm.kl.estimator", "full", rule, way_out)
    if placement == "reward":
        rule = (
            "in the reward, the divergence of a state does not depend on the token chosen there, "
            "so that it would not steer that choice"
        )
        refuse("algorithm.kl.estimator", "full", rule, way_out)
    for name, value, off in (("top_k", rollout.top_k, 0), ("top_p", rollout.top_p, 1.0)):
        if value != off:
            rule = f"compares whole distributions, and rollout.{name}={value} trains a cut one"
            way_out = f"set rollout.{name}={off} or algorithm.kl.estimator=k3"
            refuse("algorithm.kl.estimator", "full", rule, way_out)
    if config.role_parallel("reference") != config.role_parallel("actor"):
        rule = "needs the vocabulary of reference and actor cut alike"
        way_out = "remove model.reference.parallel or use algorithm.kl.estimator=k3"
        refuse("algorithm.kl.estimator", "full", rule, way_out)


def _check_lengths(config: Config) -> None:
    rollout, prompt = config.rollout, config.data.max_prompt_length
    if rollout.min_new_tokens > rollout.max_new_tokens:
        rule = f"is larger than rollout.max_new_tokens={rollout.max_new_tokens}"
        way_out = f"use at most {rollout.max_new_tokens}"
        refuse("rollout.min_new_tokens", rollout.min_new_tokens, rule, way_out)
    if prompt is not None and rollout.max_length is not None and rollout.max_length <= prompt:
        rule = f"leaves no room for a response to a prompt of data.max_prompt_length={prompt}"
        refuse("rollout.max_length", rollout.max_length, rule, f"use more than {prompt}")
    longest = rollout.longest_sequence(prompt)
    budget = config.training.max_tokens_per_micro_batch
    if budget is not None and longest is not None and budget < longest:
        rule = f"the longest sequence (prompt + response) has {longest} tokens and would not fit"
        way_out = f"use at least {longest}, or shorten rollout.max_new_tokens"
        refuse("training.max_tokens_per_micro_batch", budget, rule, way_out)
    if rollout.kv_cache_gb is not None and rollout.kv_memory_fraction != 0.8:
        rule = "has no effect when rollout.kv_cache_gb is given"
        way_out = "keep one of the two"
        refuse("rollout.kv_memory_fraction", rollout.kv_memory_fraction, rule, way_out)


def _check_batches(config: Config) -> None:
    training, samples = config.training, config.samples_per_step
    mini = training.mini_batch_size
    if mini is not None and samples % mini:
        fitting = [size for size in range(1, samples + 1) if samples % size == 0]
        near = sorted(sorted(fitting, key=lambda size: abs(size - mini))[:3])
        rule = f"must divide the {samples} samples of a step (rollout.batch_size * rollout.n)"
        refuse("training.mini_batch_size", mini, rule, f"use one of {near}")
    micro = training.micro_batch_size
    if micro is not None and training.max_tokens_per_micro_batch is not None:
        rule = "training.max_tokens_per_micro_batch also decides the size of a micro-batch"
        refuse("training.micro_batch_size", micro, rule, "keep one of the two")
    if not training.packing and training.max_tokens_per_micro_batch is not None:
        rule = "training.max_tokens_per_micro_batch counts the tokens of packed sequences"
        refuse("training.packing", False, rule, "use training.micro_batch_size")
    if micro is not None and micro > config.mini_batch_size:
        rule = f"is larger than the mini-batch of {config.mini_batch_size} samples"
        refuse("training.micro_batch_size", micro, rule, f"use at most {config.mini_batch_size}")


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    if config.data.eval is not None:
        return
    for name in ("interval", "at_start", "at_end"):
        value = getattr(evaluation, name)
        if value:
            rule = "there are no held-out prompts: data.eval is null"
            way_out = "set data.eval to a JSONL or Parquet file or remove it"
            refuse(f"evaluation.{name}", value, rule, way_out)
