"""Rules between the settings of how a run is executed: layout, optimizers, memory, saving."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .schema import in_yaml, refuse, refuse_idle_options

if TYPE_CHECKING:
    from .root import Config


def check_execution(config: Config) -> None:
    """Refuse settings of layout, optimizers, memory and saving that contradict each other."""
    for check in (
        _check_layout, _check_models, _check_tokenizer, _check_grad_reduce, _check_optimizers,
        _check_compression, _check_generation_layout, _check_offload, _check_shared_embedding,
        _check_checkpoint,
        _check_monitor,
    ):  # fmt: skip
        check(config)


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples of ``factor`` next to ``size``, in words."""
    below = size // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def _check_layout(config: Config) -> None:
    layouts = {"parallel": config.parallel}
    for role in ("actor", "critic", "reference", "reward"):
        own = config.role(role).parallel
        if own is not None:
            layouts[f"model.{role}.parallel"] = own
    for prefix, layout in layouts.items():
        if layout.vpp > 1 and layout.pp == 1:
            rule = f"virtual stages need a pipeline, and {prefix}.pp is 1"
            refuse(f"{prefix}.vpp", layout.vpp, rule, f"set {prefix}.pp > 1 or {prefix}.vpp=1")
        if layout.tp % layout.ep:
            rule = f"experts are spread over the {layout.tp} ranks of a tensor parallel group"
            fits = [ep for ep in range(1, layout.tp + 1) if layout.tp % ep == 0]
            refuse(f"{prefix}.ep", layout.ep, rule, f"use one of {fits} or raise {prefix}.tp")
    parallel = config.parallel
    if parallel.sp and parallel.tp == 1:
        rule = "sequence parallelism splits over tensor parallel ranks, and parallel.tp is 1"
        refuse("parallel.sp", True, rule, "set parallel.tp > 1 or parallel.sp=false")
    own = config.model.actor.parallel
    if own is not None:
        rule = "the actor's layout is the section parallel"
        refuse("model.actor.parallel", own, rule, "set parallel.tp, parallel.pp and parallel.vpp")


def _check_models(config: Config) -> None:
    for role in ("critic", "reference", "reward"):
        model = config.role(role)
        if model.revision is not None and model.path is None:
            rule = f"is the revision of model.{role}.path, which is null"
            way_out = f"set model.{role}.path too or remove it"
            refuse(f"model.{role}.revision", model.revision, rule, way_out)
    if config.model.attention_backend == "varlen" and config.training.dtype == "fp32":
        rule = "torch's packed attention computes in half precision only"
        way_out = "set training.dtype=bf16 or model.attention_backend=torch"
        refuse("model.attention_backend", "varlen", rule, way_out)
    for role, exists, why_not, needed in (
        ("reference", config.has_reference, "enable is false", "enable=true"),
        ("reward", config.has_learned_reward, "path is null", "path"),
    ):
        for name in ("path", "parallel", "ranks"):
            value = getattr(config.role(role), name)
            if value is not None and not exists:
                rule = f"has no effect while model.{role}.{why_not}"
                way_out = f"set model.{role}.{needed} or remove it"
                refuse(f"model.{role}.{name}", value, rule, way_out)


def _check_grad_reduce(config: Config) -> None:
    parallel, way = config.parallel, config.training.grad_reduce
    if parallel.overlap_grad_reduce and way == "manual":
        rule = "reduces during the backward pass, and training.grad_reduce=manual after it"
        way_out = "set training.grad_reduce=ddp or parallel.overlap_grad_reduce=false"
        refuse("parallel.overlap_grad_reduce", True, rule, way_out)
    if parallel.overlap_param_gather and way != "distributed_optimizer":
        rule = f"there is nothing to gather with training.grad_reduce={way}"
        way_out = "set training.grad_reduce=distributed_optimizer"
        refuse("parallel.overlap_param_gather", True, rule, way_out)
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        rule = "needs the buckets of parallel.overlap_grad_reduce"
        refuse("parallel.overlap_param_gather", True, rule, "set parallel.overlap_grad_reduce=true")


def _check_optimizers(config: Config) -> None:
    for role in ("actor", "critic"):
        optimizer, prefix = getattr(config.training, role), f"training.{role}"
        if optimizer.min_lr > optimizer.lr:
            rule = f"is larger than {prefix}.lr={optimizer.lr}"
            refuse(f"{prefix}.min_lr", optimizer.min_lr, rule, f"use at most {optimizer.lr}")
        if optimizer.min_lr > 0 and optimizer.schedule == "constant":
            rule = f"has no effect with {prefix}.schedule=constant"
            way_out = f"set {prefix}.schedule=linear or cosine, or remove it"
            refuse(f"{prefix}.min_lr", optimizer.min_lr, rule, way_out)
        if optimizer.warmup_steps > config.training.steps:
            rule = f"is longer than the run of training.steps={config.training.steps}"
            way_out = f"use at most {config.training.steps}"
            refuse(f"{prefix}.warmup_steps", optimizer.warmup_steps, rule, way_out)
        if optimizer.name == "sgd" and config.training.distributed_optimizer:
            rule = "Megatron's distributed optimizer works with adam only"
            way_out = f"set training.grad_reduce=ddp, or {prefix}.name=adam"
            refuse(f"{prefix}.name", optimizer.name, rule, way_out)
        if optimizer.momentum > 0 and optimizer.name != "sgd":
            rule = f"only sgd has a momentum, and {prefix}.name={optimizer.name}"
            way_out = f"set {prefix}.beta1, or {prefix}.name=sgd"
            refuse(f"{prefix}.momentum", optimizer.momentum, rule, way_out)


def _check_compression(config: Config) -> None:
    compression, prefix = config.training.gradient_compression, "training.gradient_compression"
    size = compression.block_size
    if size not in (128, 256, 512):
        rule = "must be a power of two for which there are kernels"
        refuse(f"{prefix}.block_size", size, rule, "use 128, 256 or 512")
    refuse_idle_options(compression, prefix)
    if compression.enable and config.training.grad_reduce == "manual":
        rule = "compression works in the gradient buckets, and training.grad_reduce=manual has none"
        way_out = "set training.grad_reduce=ddp or distributed_optimizer"
        refuse(f"{prefix}.enable", True, rule, way_out)


def _check_generation_layout(config: Config) -> None:
    engine, parallel = config.hybrid_engine, config.parallel
    for name, size in (("generation_tp", parallel.tp), ("generation_pp", parallel.pp)):
        own = getattr(engine, name)
        if own is None:
            continue
        if engine.mode == "zero_repartitioning":
            rule = "zero_repartitioning generates on the training layout"
            way_out = "set hybrid_engine.mode=micro_dp or remove it"
            refuse(f"hybrid_engine.{name}", own, rule, way_out)
        if size % own:
            axis = name.removeprefix("generation_")
            fitting = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
            rule = f"must divide parallel.{axis}={size}"
            refuse(f"hybrid_engine.{name}", own, rule, f"use one of {fitting}")
    _check_micro_dp(config)


def _check_micro_dp(config: Config) -> None:
    engine, parallel = config.hybrid_engine, config.parallel
    ranks = parallel.tp * parallel.pp
    if engine.mode == "zero_repartitioning":
        if engine.micro_dp_size is not None:
            rule = "zero_repartitioning has one generation replica in each training replica"
            way_out = "set hybrid_engine.mode=micro_dp or remove it"
            refuse("hybrid_engine.micro_dp_size", engine.micro_dp_size, rule, way_out)
        if engine.keep_generation_weights:
            rule = "zero_repartitioning gathers no weights that could be kept"
            way_out = "set hybrid_engine.mode=micro_dp or remove it"
            refuse("hybrid_engine.keep_generation_weights", True, rule, way_out)
        return
    layouts = engine.generation_layouts(parallel.tp, parallel.pp)
    if not layouts:
        free = dataclasses.replace(engine, micro_dp_size=None)
        fitting = free.generation_layouts(parallel.tp, parallel.pp)
        smallest = 1 if engine.mode == "auto" else 2
        sizes = sorted({ranks // (t * p) for t, p in fitting if ranks // (t * p) >= smallest})
        rule = f"must be tp*pp / (generation_tp*generation_pp), with tp*pp = {ranks}"
        choice = sizes[0] if len(sizes) == 1 else f"one of {sizes}"
        refuse("hybrid_engine.micro_dp_size", engine.micro_dp_size, rule, f"use {choice}")
    if engine.mode == "auto":
        return
    way_out = "set hybrid_engine.mode=zero_repartitioning"
    if ranks == 1:
        refuse("hybrid_engine.mode", "micro_dp", "parallel.tp*parallel.pp is 1: no smaller layout "
               "exists", way_out)  # fmt: skip
    if {None} == {engine.micro_dp_size, engine.generation_tp, engine.generation_pp}:
        inside = [f"tp={t} pp={p}" for t, p in layouts if (t, p) != (parallel.tp, parallel.pp)]
        rule = f"needs the generation layout; inside tp={parallel.tp} pp={parallel.pp} fit "
        ways = "set hybrid_engine.generation_tp and generation_pp, or micro_dp_size"
        refuse("hybrid_engine.mode", "micro_dp", rule + ", ".join(inside), ways)
    if layouts[0] == (parallel.tp, parallel.pp):
        rule = "the generation layout is the training layout, which needs no gathering"
        refuse("hybrid_engine.mode", "micro_dp", rule, way_out)


def _check_offload(config: Config) -> None:
    exists = {"reference": config.has_reference, "reward": config.has_learned_reward}
    for name in ("actor", "critic", "reference", "reward", "optimizer"):
        prefix = f"hybrid_engine.{name}_offload"
        offload = getattr(config.hybrid_engine, f"{name}_offload")
        if offload.enable and offload.offload_device is None:
            rule = "is required when offloading is enabled"
            refuse(f"{prefix}.offload_device", None, rule, f"set {prefix}.offload_device=cpu")
        if offload.enable and not exists.get(name, True):
            rule = f"this run has no {name} model"
            refuse(f"{prefix}.enable", True, rule, "remove it")
        refuse_idle_options(offload, prefix)


def _check_shared_embedding(config: Config) -> None:
    share, setting_name = config.hybrid_engine.share_embeddings, "hybrid_engine.share_embeddings"
    if share is False or not config.has_critic:
        return
    if config.role_parallel("critic") != config.role_parallel("actor"):
        rule = "actor and critic must be cut alike, and model.critic.parallel differs"
        refuse(setting_name, share, rule, "remove model.critic.parallel")
    if config.role_path("critic") != config.role_path("actor"):
        rule = "the critic would read another model's embedding table"
        refuse(setting_name, share, rule, "remove model.critic.path")
    if config.hybrid_engine.actor_offload.enable:
        rule = "the critic reads the actor's table while hybrid_engine.actor_offload has it away"
        refuse(setting_name, share, rule, "remove hybrid_engine.actor_offload")
    if share == "joint":
        _check_joint_embedding(config, setting_name)


def _check_joint_embedding(config: Config, setting_name: str) -> None:
    warmup, way_out = config.algorithm.critic_warmup_steps, "or use read_only"
    if warmup:
        rule = (
            "both models must step together, and the actor does not in the first "
            f"algorithm.critic_warmup_steps={warmup} steps"
        )
        refuse(setting_name, "joint", rule, f"remove algorithm.critic_warmup_steps {way_out}")
    if config.training.dtype == "fp16":
        rule = "with training.dtype=fp16 each model scales its gradients by a factor of its own"
        refuse(setting_name, "joint", rule, f"set training.dtype=bf16 {way_out}")


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    every, interval = checkpoint.keep_every, checkpoint.save_interval
    if every is None:
        return
    if interval is None or every % interval:
        rule = f"must be a multiple of checkpoint.save_interval={in_yaml(interval)}"
        fitting = None if interval is None else nearest_multiples(every, interval)
        way_out = f"use {fitting}" if fitting else "set checkpoint.save_interval"
        refuse("checkpoint.keep_every", every, rule, way_out)


def _check_monitor(config: Config) -> None:
    profile, steps = config.monitor.profile, config.training.steps
    late = [step for step in profile.steps if step > steps]
    if late:
        rule = f"the run has training.steps={steps}"
        refuse("monitor.profile.steps", late[0], rule, f"use steps from 1 to {steps}")
    if profile.steps and not profile.ranks:
        way_out = "name a rank, or set monitor.profile.steps=[]"
        refuse("monitor.profile.ranks", profile.ranks, "no rank would write the traces", way_out)


def _check_tokenizer(config: Config) -> None:
    tokenizer = config.model.tokenizer
    if tokenizer.revision is not None and tokenizer.path is None:
        rule = "is the revision of model.tokenizer.path, which is null"
        way_out = "set model.tokenizer.path too or remove it"
        refuse("model.tokenizer.revision", tokenizer.revision, rule, way_out)
    if tokenizer.type == "sentencepiece":
        if config.data.chat_template:
            rule = "a SentencePiece file holds no chat template"
            way_out = "write the template's text into the prompts and set data.chat_template=false"
            refuse("data.chat_template", True, rule, way_out)
        return
    for name in ("bos_token", "eos_token", "pad_token"):
        value = getattr(tokenizer, name)
        if value is not None:
            rule = "is for SentencePiece; a Hugging Face tokenizer brings its own"
            way_out = "remove it or set model.tokenizer.type=sentencepiece"
            refuse(f"model.tokenizer.{name}", value, rule, way_out)
