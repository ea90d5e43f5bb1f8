"""Builds the models of a run on this rank and loads their weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.comm.hierarchy import NodeGroups, build_node_groups
from megatron_rl.config import Config
from megatron_rl.convert.load import load_weights
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.generation.cache import free_memory
from megatron_rl.generation.engine import Engine
from megatron_rl.models.gpt import ParallelModel, build_model
from megatron_rl.models.shared_embedding import SharedEmbedding
from megatron_rl.parallel import Layout, ParallelGroups, seed_model_parallel
from megatron_rl.resharding.cost_model import Work, choose
from megatron_rl.resharding.speeds import measure_speeds
from megatron_rl.resharding.transition import MicroDP, Transition, ZeroRepartitioning
from megatron_rl.rollout.collect import engine_settings
from megatron_rl.run_inputs import RunInputs
from megatron_rl.runtime import log


@dataclass(kw_only=True, slots=True)
class Models:
    """The models of a run, and the way from training the actor to generating with it.

    Attributes:
        embedding: the actor's table in the critic; None: each has its own.
    """

    actor: Trainable
    critic: Trainable | None
    reference: ParallelModel | None
    reward: ParallelModel | None
    transition: Transition
    embedding: SharedEmbedding | None = None

    @property
    def engine(self) -> Engine:
        """What generates on this rank."""
        return self.transition.engine

    def start_critic_at(self, scores_B: Tensor, groups: ParallelGroups) -> None:
        """Sets a fresh value head's bias to the mean score of the first rollout.

        With its zero weights the critic then predicts that mean everywhere: the first advantages
        are centred instead of all of one sign.
        """
        sums = torch.stack((scores_B.double().sum(), torch.tensor(float(len(scores_B)))))
        dist.all_reduce(sums, group=groups.data_control())
        mean = float(sums[0] / sums[1])
        for chunk in self.critic.model.chunks:
            if chunk.post_process:
                with torch.no_grad():
                    if not bool(chunk.output_layer.weight.any()):
                        chunk.output_layer.bias.fill_(mean)
        self.critic.reload_main_params()


def build_models(config: Config, inputs: RunInputs, world_size: int) -> Models:
    """Allocates and loads every role under its layout; all ranks must call this together."""
    groups = _groups_by_role(config, inputs, world_size)
    seed_model_parallel(config.seed, groups["actor"])
    model = _model("actor", config, inputs, groups["actor"], trainable=True)
    actor = _trainable(config, model)
    critic = embedding = None
    if config.has_critic:
        model = _model("critic", config, inputs, groups["critic"], trainable=True)
        embedding = _shared_embedding(config, actor.model, model)
        critic = _trainable(config, model)
    frozen = {
        role: _model(role, config, inputs, groups[role], trainable=False)
        for role in ("reference", "reward")
        if role in groups
    }
    return Models(
        actor=actor, critic=critic, reference=frozen.get("reference"), reward=frozen.get("reward"),
        transition=_transition(config, actor.model, inputs), embedding=embedding,
    )  # fmt: skip


def build_frozen(
    config: Config, inputs: RunInputs, role: str, world_size: int
) -> ParallelModel:
    """Allocates and loads the one model of ranks that hold nothing else."""
    groups = ParallelGroups(layout=_layout(config, role, world_size))
    seed_model_parallel(config.seed, groups)
    return _model(role, config, inputs, groups, trainable=False)


def _transition(config: Config, actor: ParallelModel, inputs: RunInputs) -> Transition:
    """The configured way to generation, or the one that is estimated to be fastest."""
    engine, settings = config.hybrid_engine, engine_settings(config)
    if engine.mode == "zero_repartitioning":
        return ZeroRepartitioning(actor, settings, inputs.tokenizer.decode)
    train = actor.groups.layout
    layouts = engine.generation_layouts(train.tp, train.pp)
    tp, pp = layouts[0] if engine.mode == "micro_dp" else _fastest(config, actor, layouts)
    if (tp, pp) == (train.tp, train.pp):
        return ZeroRepartitioning(actor, settings, inputs.tokenizer.decode)
    return MicroDP(
        actor, train.generation_layout(tp=tp, pp=pp), settings, dtype=config.training.dtype,
        backend=config.model.layer_spec, keep=engine.keep_generation_weights,
        decode=inputs.tokenizer.decode,
    )  # fmt: skip


def _fastest(
    config: Config, actor: ParallelModel, layouts: list[tuple[int, int]]
) -> tuple[int, int]:
    """Measures, estimates every allowed layout and logs the arithmetic; the same on all ranks."""
    arch, layout = actor.arch, actor.groups.layout
    dtype = actor.config.params_dtype
    speeds = measure_speeds(actor.groups, actor.device, dtype)
    free = torch.tensor([free_memory(actor.device)], dtype=torch.int64, device=actor.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=actor.groups.world)
    work = Work(
        model_bytes=arch.parameters() * dtype.itemsize, parameters=arch.parameters(),
        layers=arch.layers, hidden=arch.hidden, element_bytes=dtype.itemsize,
        sequences=config.samples_per_step // layout.dp, new_tokens=config.rollout.max_new_tokens,
        max_running=config.rollout.max_running, free_bytes=int(free) // 2,
    )  # fmt: skip
    best, estimates = choose(work, speeds, t=layout.tp, p=layout.pp, layouts=layouts)
    log.info("hybrid_engine.mode auto: measured %s; %s", speeds, work)
    for estimate in estimates:
        log.info("hybrid_engine.mode auto: %s", estimate)
    log.info("hybrid_engine.mode auto: generates at tp=%d pp=%d", best.tp, best.pp)
    return best.tp, best.pp


def _groups_by_role(
    config: Config, inputs: RunInputs, world_size: int
) -> dict[str, ParallelGroups]:
    """One `ParallelGroups` per distinct layout, shared by the roles that have it."""
    made: dict[Layout, ParallelGroups] = {}
    by_role = {}
    for role in inputs.architectures:
        if role in config.ranks_apart:
            continue
        layout = _layout(config, role, world_size)
        if layout not in made:
            made[layout] = ParallelGroups(layout=layout)
        by_role[role] = made[layout]
    return by_role


def _layout(config: Config, role: str, world_size: int) -> Layout:
    own = config.role_parallel(role)
    return Layout(world_size=world_size, tp=own.tp, pp=own.pp, vpp=own.vpp, ep=own.ep)


def _model(
    role: str, config: Config, inputs: RunInputs, groups: ParallelGroups, *, trainable: bool
) -> ParallelModel:
    model = build_model(
        role, inputs.architectures[role], groups, dtype=config.training.dtype,
        sp=config.parallel.sp, recompute=config.training.recompute if trainable else "none",
        backend=config.model.layer_spec, attention=config.model.attention_backend,
        trainable=trainable,
        window=config.rollout.max_cache_len if role in ("actor", "reference") else None,
        fp32_logits=config.training.fp32_logits,
    )  # fmt: skip
    load_weights(model, inputs.models[role], show=config.monitor.console and dist.get_rank() == 0)
    return model


def _shared_embedding(
    config: Config, actor: ParallelModel, critic: ParallelModel
) -> SharedEmbedding | None:
    share = config.hybrid_engine.share_embeddings
    if share is False:
        return None
    embedding = SharedEmbedding(actor, critic, joint=share == "joint")
    log.info(
        "hybrid_engine.share_embeddings: %d bytes of weights are not held twice",
        embedding.saved_bytes,
    )
    return embedding


def _trainable(config: Config, model: ParallelModel) -> Trainable:
    """Wraps a loaded model for training."""
    training = config.training
    steps_per_rollout = training.epochs * -(-config.samples_per_step // config.mini_batch_size)
    return Trainable(
        model, getattr(training, model.role),
        total_steps=training.steps * steps_per_rollout,
        distributed_optimizer=training.distributed_optimizer,
        one_all_reduce=training.grad_reduce == "manual",
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        compression=training.gradient_compression, nodes=_node_groups(config, model.groups),
    )  # fmt: skip


def _node_groups(config: Config, groups: ParallelGroups) -> NodeGroups | None:
    """Groups inside and between nodes for the hierarchical int8 reduction."""
    compression = config.training.gradient_compression
    if not (compression.enable and compression.hierarchical):
        return None
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", groups.layout.world_size))
    return build_node_groups(groups.layout.group_ranks({"dp"}), ranks_per_node)
