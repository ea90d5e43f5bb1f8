"""Everything that a run reads, checked before a process group or a GPU is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.algorithms.plugins import (
    ADVANTAGE_FUNCTION_ARGS,
    POLICY_LOSS_FUNCTION_ARGS,
    load_function,
)
from megatron_rl.config import Config, ConfigError
from megatron_rl.convert.companions import with_tokenizer
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.hub import Named, is_data_id, is_hub_id, prompt_file, tokenizer_place
from megatron_rl.model_inputs import model_folders, read_model
from megatron_rl.models.architecture import Architecture
from megatron_rl.monitor import wandb_mirror
from megatron_rl.once_per_node import NodeRank
from megatron_rl.resharding.model_specs import check_generation_layout
from megatron_rl.rewards.base import RewardFunction, check_signature, load_reward
from megatron_rl.rewards.model import SampleReader, check_reward_model
from megatron_rl.rollout.prompts import Prompt, PromptFile, PromptStream
from megatron_rl.surroundings import check_disk, check_folders, check_variables
from megatron_rl.text import Tokenizer, load_tokenizer


@dataclass(kw_only=True, slots=True)
class RunInputs:
    """Tokenizer, prompts, reward, and the local folder of each role and the model in it.

    Attributes:
        companions: small files that travel with the trained actor: its own, with the run's
            tokenizer.
    """

    config: Config
    tokenizer: Tokenizer
    companions: dict[str, Path]
    stream: PromptStream
    eval_file: PromptFile | None
    reward: RewardFunction | None
    reward_reader: SampleReader | None
    folders: dict[str, Path]
    models: dict[str, ModelFolder]

    @classmethod
    def check(cls, config: Config, reward: RewardFunction | None) -> RunInputs:
        """Reads and checks all inputs.

        Raises:
            ConfigError: one sentence that names the setting, its value, the rule and the way out.
        """
        check_variables(config, os.environ)
        check_folders(config)
        _check_plugins(config)
        if config.monitor.wandb:
            wandb_mirror.check_installed()
        node = NodeRank.read()
        folders = model_folders(config, node)
        models = {role: read_model(config, role, folders[role]) for role in folders}
        architectures = {role: model.architecture for role, model in models.items()}
        actor = architectures["actor"]
        trained = [role for role in ("actor", "critic") if role in architectures]
        check_disk(config, [(role, architectures[role]) for role in trained])
        _check_vocabularies(config, architectures)
        _check_generation(config, actor)
        _check_experts(config, architectures)
        companions, place = models["actor"].companions(), _tokenizer_place(config, node)
        if place is not None:
            companions = with_tokenizer(companions, place)
        tokenizer = _tokenizer(config, place or models["actor"].companion_folder, actor)
        reader = None
        if config.has_learned_reward:
            reader = check_reward_model(config, models["reward"], tokenizer)
        limit = min(
            x for x in (config.data.max_prompt_length, config.rollout.max_length,
                        config.rollout.max_cache_len, actor.max_positions) if x is not None
        )  # fmt: skip
        if config.data.max_prompt_length is None:
            limit -= 1  # room for one new token
        kwargs = dict(
            prompt_key=config.data.prompt_key, chat_template=config.data.chat_template,
            tokenizer=tokenizer, limit=limit,
        )  # fmt: skip
        paths = _prompt_paths(config, node)
        train = PromptFile(paths["train"], setting="data.train", **kwargs)
        eval_file = None
        if "eval" in paths:
            eval_file = PromptFile(paths["eval"], setting="data.eval", **kwargs)
        return cls(
            config=config, tokenizer=tokenizer, companions=companions, folders=folders,
            models=models, eval_file=eval_file,
            stream=PromptStream(train, shuffle=config.data.shuffle, seed=config.seed),
            reward=_reward(config, reward), reward_reader=reader,
        )  # fmt: skip

    @property
    def architectures(self) -> dict[str, Architecture]:
        """By role."""
        return {role: model.architecture for role, model in self.models.items()}

    @property
    def architectures_here(self) -> dict[str, Architecture]:
        """Those of the models on the ranks that train."""
        apart = self.config.ranks_apart
        return {role: arch for role, arch in self.architectures.items() if role not in apart}

    @property
    def may_be_late(self) -> bool:
        """Whether another node may take long for its inputs, because some come from the hub."""
        config = self.config
        names = [config.role_path(role) for role in self.folders]
        names.append(config.model.tokenizer.path)
        data = [config.data.train, config.data.eval]
        return any(map(is_hub_id, filter(None, names))) or any(
            map(is_data_id, filter(None, data))
        )

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts that an evaluation uses.

        Raises:
            ConfigError: without `data.eval`.
        """
        if self.eval_file is None:
            raise ConfigError(
                "data.eval is null: an evaluation needs held-out prompts; name a file of them",
                setting="data.eval",
            )
        count = min(self.config.evaluation.prompts or len(self.eval_file), len(self.eval_file))
        return self.eval_file.read(range(count))


def _check_plugins(config: Config) -> None:
    """Imports the user's own estimator and loss now, not at the first update."""
    for name, arguments in (
        ("advantage_function", ADVANTAGE_FUNCTION_ARGS),
        ("policy_loss_function", POLICY_LOSS_FUNCTION_ARGS),
    ):
        function = getattr(config.algorithm, name)
        try:
            if function is not None:
                load_function(function, arguments)
        except ValueError as error:
            setting = f"algorithm.{name}"
            raise ConfigError(f"{setting}: {error}", setting=setting) from error


def _check_vocabularies(config: Config, architectures: dict[str, Architecture]) -> None:
    sizes = {role: architectures[role].vocab for role in ("actor", "reference")
             if role in architectures}  # fmt: skip
    if config.algorithm.kl.estimator == "full" and len(set(sizes.values())) > 1:
        raise ConfigError(
            f"algorithm.kl.estimator is 'full', but the vocabularies differ ({sizes}): whole "
            "distributions can't be compared; use a reference of the actor's family or "
            "algorithm.kl.estimator=k3",
            setting="algorithm.kl.estimator",
        )


def _check_experts(config: Config, architectures: dict[str, Architecture]) -> None:
    """What a mixture of experts asks of the layout, and that one is there where it is spread."""
    ep = config.parallel.ep
    if ep > 1 and all(arch.experts is None for arch in architectures.values()):
        raise ConfigError(
            f"parallel.ep={ep} does not fit the model of this run: it has no experts that could be "
            "spread over ranks; ep that fits: [1]",
            setting="parallel.ep",
        )
    for role, arch in architectures.items():
        if arch.experts is None:
            continue
        if not hasattr(torch.nn.functional, "grouped_mm"):
            raise ConfigError(
                f"model.{role}.path: a mixture of experts needs the grouped products of torch 2.10 "
                f"or later, and this is torch {torch.__version__}; install a later torch",
                setting=f"model.{role}.path",
            )
        tp, mode = config.role_parallel(role).tp, config.hybrid_engine.mode
        if tp > 1 and not config.parallel.sp:
            raise ConfigError(
                f"parallel.sp is false, but the {role} is a mixture of experts with tp={tp}: its "
                "ranks would compute every token tp times; set parallel.sp=true",
                setting="parallel.sp",
            )
        if role == "actor" and mode != "zero_repartitioning":
            raise ConfigError(
                f"hybrid_engine.mode is {mode}, but the actor is a mixture of experts, whose "
                "weights are not regrouped for generation; set "
                "hybrid_engine.mode=zero_repartitioning",
                setting="hybrid_engine.mode",
            )


def _check_generation(config: Config, actor: Architecture) -> None:
    """Every tensor of the actor must be cut for the generation layout."""
    engine, parallel = config.hybrid_engine, config.parallel
    if engine.mode == "zero_repartitioning":
        return
    layouts = engine.generation_layouts(parallel.tp, parallel.pp)
    tp, pp = layouts[0]
    try:
        for tp, pp in layouts if engine.mode == "auto" else layouts[:1]:
            check_generation_layout(
                actor, tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, generation_tp=tp,
                generation_pp=pp,
            )  # fmt: skip
    except ValueError as error:
        raise ConfigError(
            f"hybrid_engine.mode is {engine.mode!r} with generation tp={tp} pp={pp}: {error}; use "
            "another generation layout or hybrid_engine.mode=zero_repartitioning",
            setting="hybrid_engine.mode",
        ) from error


def _tokenizer_place(config: Config, node: NodeRank) -> Path | None:
    """Where the tokenizer that is named lies; None: the one in the actor's folder is meant."""
    settings = config.model.tokenizer
    if settings.path is None:
        return None
    named = Named(
        name=settings.path, revision=settings.revision, setting="model.tokenizer.path",
        revision_setting="model.tokenizer.revision",
    )  # fmt: skip
    return tokenizer_place(named, node, trust_remote_code=config.model.trust_remote_code)


def _tokenizer(config: Config, place: Path, actor: Architecture) -> Tokenizer:
    """The tokenizer in a folder or file; the actor must have a row for each of its tokens."""
    tokenizer = load_tokenizer(
        place, config.model.tokenizer, trust_remote_code=config.model.trust_remote_code
    )
    if len(tokenizer) > actor.vocab:
        raise ConfigError(
            f"model.tokenizer.path: the tokenizer in {str(place)!r} has {len(tokenizer)} "
            f"tokens but the actor's vocabulary has {actor.vocab}; use the model's own tokenizer",
            setting="model.tokenizer.path",
        )
    return tokenizer


def _prompt_paths(config: Config, node: NodeRank) -> dict[str, Path]:
    """Split ("train" and, where there is one, "eval") → local file of prompts."""
    names = {"train": config.data.train, "eval": config.data.eval}
    revision = config.data.revision
    on_hub = {split: is_data_id(name) for split, name in names.items() if name is not None}
    if revision is not None and not any(on_hub.values()):
        raise ConfigError(
            f"data.revision is {revision!r}, but data.train and data.eval are on this disk, and "
            "only hub ids have revisions; remove it or give a hub id",
            setting="data.revision",
        )
    return {
        split: prompt_file(
            Named(
                name=names[split], revision=revision if is_id else None,
                setting=f"data.{split}", revision_setting="data.revision",
            ),
            node, split=split,
        )
        for split, is_id in on_hub.items()
    }  # fmt: skip


def _reward(config: Config, given: RewardFunction | None) -> RewardFunction | None:
    """The reward function; None where a learned model alone rewards."""
    settings, with_model = config.reward, config.has_learned_reward
    if given is not None:
        return check_signature(
            given, getattr(given, "__name__", "reward"), {}, with_model=with_model
        )
    if settings.function is not None:
        return load_reward(settings.function, settings.kwargs, with_model=with_model)
    if not with_model:
        raise ConfigError(
            "reward.function is null and no reward was passed to Trainer; name a function as "
            "module:function or path/to/file.py:function, or a learned one with model.reward.path",
            setting="reward.function",
        )
    if settings.kwargs:
        raise ConfigError(
            f"reward.kwargs is {settings.kwargs!r}, but reward.function is null: there is nothing "
            "to pass them to; remove them or name a function",
            setting="reward.kwargs",
        )
    return None
