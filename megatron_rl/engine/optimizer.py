"""Makes a model trainable: Megatron's DDP and optimizer, one clip, one schedule, one skip rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.comm.grad_sync import install
from megatron_rl.comm.hierarchy import NodeGroups
from megatron_rl.config.training import GradientCompressionSettings, OptimizerSettings
from megatron_rl.engine.schedule import finalise_gradients
from megatron_rl.models.gpt import ParallelModel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Outcome of one optimizer step, equal on all ranks.

    Attributes:
        grad_norm: norm over all parameters before clipping (may be inf or NaN).
        skipped: True when the gradient was not finite: no rank changed anything.
        lr: learning rate that the step used.
    """

    grad_norm: float
    skipped: bool
    lr: float


class Trainable:
    """A model with its gradient buffers, optimizer and schedule."""

    def __init__(
        self, model: ParallelModel, settings: OptimizerSettings, *, total_steps: int,
        distributed_optimizer: bool = True, one_all_reduce: bool = False,
        overlap_grad_reduce: bool = False, overlap_param_gather: bool = False,
        compression: GradientCompressionSettings | None = None,
        nodes: NodeGroups | None = None,
    ) -> None:  # fmt: skip
        """Wraps `model` in place.

        Args:
            total_steps: optimizer steps over which the learning rate decays.
            one_all_reduce: no reduction by Megatron's buckets but one all-reduce of the whole
                gradient buffer after accumulation (`training.grad_reduce: manual`).
            compression: reduce gradients in int8 (`training.gradient_compression`).
            nodes: this rank's node groups where the compression is hierarchical.
        """
        self.model, self.settings = model, settings
        config = model.config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce, overlap_param_gather=overlap_param_gather,
        )  # fmt: skip
        model.wrapped = [
            DistributedDataParallel(
                config, ddp_config, chunk, disable_bucketing=index > 0,
                pg_collection=model.groups.collection(),
            )
            for index, chunk in enumerate(model.chunks)
        ]  # fmt: skip
        compress = compression is not None and compression.enable
        self.compression = [
            install(chunk, compression, nodes=nodes) for chunk in model.wrapped if compress
        ]
        optimizer_config = _megatron_settings(model, settings, distributed_optimizer)
        self.optimizer = get_megatron_optimizer(
            optimizer_config, model.wrapped,
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False, pg_collection=model.groups.collection(),
        )  # fmt: skip
        config.finalize_model_grads_func = finalise_gradients
        if one_all_reduce:
            _detach_buckets(model.wrapped)
            config.finalize_model_grads_func = _reduce_once_and_finalise
        config.grad_scale_func = self.optimizer.scale_loss if config.fp16 else None
        no_sync = [chunk.no_sync for chunk in model.wrapped]
        if overlap_grad_reduce:
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.schedule = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0 if settings.warmup_steps else settings.lr,
            max_lr=settings.lr, min_lr=settings.min_lr, lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.schedule, start_wd=settings.weight_decay,
            end_wd=settings.weight_decay, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip
        if settings.warmup_steps:
            # The schedule counts finished steps; the first step uses 1/warmup of the rate.
            self.schedule.step(1)

    def zero_grad(self) -> None:
        for buffer in self._gradient_buffers():
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(buffer.grad_data.nbytes)
        for chunk in self.model.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips once and updates, or skips on all ranks together when the norm is not finite.

        The norm is reduced over every rank that holds part of the gradient, so all ranks see the
        same number and take the same branch.
        """
        optimizer = self.optimizer
        lr = self.lr
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            for part in self.compression:
                part.step_skipped()
            return StepResult(grad_norm=norm, skipped=True, lr=lr)
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and self.settings.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, self.settings.clip_grad, norm)
        optimizer.step_with_ready_grads()
        self.schedule.step(1)
        return StepResult(grad_norm=norm, skipped=False, lr=lr)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def release_gradients(self) -> None:
        """Gives the gradient buffers' memory back until the next `zero_grad`: generation takes it
        for the KV cache. The buffers' views stay bound."""
        for buffer in self._gradient_buffers():
            buffer.grad_data.untyped_storage().resize_(0)

    def _gradient_buffers(self) -> list[Any]:
        return [
            buffer
            for chunk in self.model.wrapped
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    @property
    def gathers_params(self) -> bool:
        """Whether updated weights are gathered during the next forward pass."""
        return any(chunk.ddp_config.overlap_param_gather for chunk in self.model.wrapped)

    def finish_param_gather(self) -> None:
        """Completes a pending all-gather of updated weights (`overlap_param_gather`): before this
        the weights of the next generation would be stale."""
        for chunk in self.model.wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def reload_main_params(self) -> None:
        """Copies weights that were written from outside into the optimizer's main copies."""
        self.optimizer.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Rates and lengths are the configuration's, which may have been changed or extended; only
        # the position is restored (Megatron's own method adds it to where the schedule stands).
        self.schedule.num_steps = 0
        self.schedule.step(int(state["schedule"]["num_steps"]))


class _UnsyncedBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group that leaves the reduction to somebody else."""

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        pass


def _detach_buckets(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        for group in chunk.bucket_groups:
            group.__class__ = _UnsyncedBucketGroup


def _reduce_once_and_finalise(
    chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    for chunk in chunks:
        for buffer in chunk.buffers:
            dist.all_reduce(buffer.grad_data, group=chunk.dp_cp_group)
    finalise_gradients(chunks, num_tokens, **kwargs)


def _megatron_settings(
    model: ParallelModel, settings: OptimizerSettings, distributed_optimizer: bool
) -> OptimizerConfig:
    config = model.config
    return OptimizerConfig(
        optimizer=settings.name, lr=settings.lr, min_lr=settings.min_lr,
        weight_decay=settings.weight_decay, adam_beta1=settings.beta1, adam_beta2=settings.beta2,
        adam_eps=settings.eps, sgd_momentum=settings.momentum, clip_grad=0.0,
        initial_loss_scale=2.0**16, bf16=config.bf16, fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed_optimizer,
    )  # fmt: skip


