"""int8 gradient reduction inside Megatron's data parallel buckets.

`install` turns the bucket groups of a Megatron ``DistributedDataParallel`` into `Int8BucketGroup`s.
Megatron still decides when a bucket is ready, scales it, and overlaps its reduction with the
backward pass; only what crosses the network changes. Gradient norm and clipping come after
``finish_grad_sync`` and see the reduced gradient, once.
"""

from __future__ import annotations

import fnmatch
import inspect
import logging
from collections.abc import Iterable
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_rl.comm.hierarchy import NodeGroups
from megatron_rl.comm.sync_unit import BucketPlan, SyncUnit, plan_bucket
from megatron_rl.comm.two_shot import Rules
from megatron_rl.config.training import GradientCompressionSettings
from megatron_rl.kernels.int8_allreduce import check_block_size, select_backend

logger = logging.getLogger(__name__)

_INTERFACE = {
    "start_grad_sync": ["self", "force_all_reduce"],
    "finish_grad_sync": ["self", "force_all_reduce"],
    "check_grads": ["self", "check_for_nan_or_inf", "check_for_large"],
}


def check_interface(bucket_group: type) -> None:
    """Raise ``ImportError`` unless Megatron's bucket group is as this module expects it."""
    for name, known in _INTERFACE.items():
        method = getattr(bucket_group, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != known:
            raise ImportError(
                f"megatron-core {megatron.core.__version__} has {bucket_group.__name__}.{name}"
                f"({', '.join(found) if found else 'missing'}); int8 gradients were written for "
                f"({', '.join(known)}): install a tested megatron-core, or set "
                "training.gradient_compression.enable=false"
            )


check_interface(_ParamAndGradBucketGroup)


class _UnitHandle:
    """What Megatron waits on for one bucket group; ready counts make a shared unit start once."""

    def __init__(self, unit: SyncUnit, members: int) -> None:
        self._unit, self._members, self._ready = unit, members, 0

    def mark_ready(self) -> None:
        self._ready += 1
        if self._ready == self._members:
            self._ready = 0
            self._unit.launch()

    def wait(self) -> None:
        self._unit.wait()


class Int8BucketGroup(_ParamAndGradBucketGroup):
    """Megatron's bucket group with an int8 reduction. Made by `install`, never constructed.

    With several groups in one message (``allreduce_fusion``) the last group to become ready sends
    for all, and only then does a wait have an effect; Megatron finishes all groups before it reads
    any gradient, so each has been waited for by then.
    """

    sync: _UnitHandle

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Scale the gradients and start, or without overlap also complete, their reduction."""
        if force_all_reduce and self.ddp_config.use_distributed_optimizer:
            super().start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None, "a reduction of this bucket group is in flight"
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        for bucket in self.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor
        self.sync.mark_ready()
        if config.overlap_grad_reduce:
            self.grad_reduce_handle = self.sync
        else:
            self.sync.wait()


class GradientCompression:
    """The int8 reduction of one model: its units, counters and error feedback.

    Attributes:
        units: what is reduced together.
        skipped_steps: optimizer steps that `step_skipped` was told of.
    """

    def __init__(self, units: list[SyncUnit]) -> None:
        self.units = units
        self.skipped_steps = 0

    @property
    def bytes_sent(self) -> int:
        """Payload bytes this rank has sent between ranks that exchange int8, exempt part included;
        full precision inside nodes (``hierarchical``) is not counted."""
        return sum(unit.bytes_sent for unit in self.units)

    def step_skipped(self) -> int:
        """Tell that the optimizer skipped the step because the gradient was not finite.

        Error feedback is dropped: what was lost belongs to a gradient that was never applied. All
        ranks must call.

        Returns:
            How many blocks held an inf or NaN, over all ranks of each reduction.
        """
        self.skipped_steps += 1
        total = 0
        for unit in self.units:
            unit.forget_residuals()
            count = torch.tensor([unit.take_nonfinite()], device=unit.plans[0].grad.device)
            dist.all_reduce(count, group=unit.group)
            total += int(count)
        logger.warning(
            "step skipped: %d blocks of the gradient held an inf or NaN; error feedback reset",
            total,
        )
        return total

    def state_dict(self) -> dict[str, Any]:
        """State of this rank: error feedback and counters. Every rank has its own."""
        return {
            "data_parallel_size": [unit.group.size() for unit in self.units],
            "steps": [unit.steps for unit in self.units],
            "skipped_steps": self.skipped_steps,
            "residuals": [
                [None if r is None else r.detach().clone() for r in pair]
                for unit in self.units
                for pair in unit.residuals
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; error feedback starts at zero when the layout has changed."""
        self.skipped_steps = state["skipped_steps"]
        steps = max(state["steps"], default=0)
        for unit in self.units:
            unit.steps = steps
        ours = [pair for unit in self.units for pair in unit.residuals]
        sizes = [unit.group.size() for unit in self.units]
        if sizes == state["data_parallel_size"] and _shapes(ours) == _shapes(state["residuals"]):
            for mine, theirs in zip(ours, state["residuals"], strict=True):
                for residual, saved in zip(mine, theirs, strict=True):
                    if residual is not None:
                        residual.copy_(saved)
            return
        for unit in self.units:
            unit.forget_residuals()
        logger.warning(
            "error feedback of int8 gradients starts at zero: the checkpoint has data parallel "
            "sizes %s, this run %s, or the buckets differ",
            state["data_parallel_size"], sizes,
        )  # fmt: skip


def _shapes(residuals: Iterable[Iterable[torch.Tensor | None]]) -> list[list[Any]]:
    return [[None if r is None else tuple(r.shape) for r in pair] for pair in residuals]


def install(
    ddp: DistributedDataParallel,
    settings: GradientCompressionSettings,
    *,
    nodes: NodeGroups | None = None,
    residual_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> GradientCompression:
    """Make a wrapped model reduce its gradients in int8.

    Args:
        ddp: the model chunk, before its first backward pass.
        settings: ``training.gradient_compression``.
        nodes: groups of this rank (`hierarchy.build_node_groups`) for ``hierarchical``.
        residual_dtype: how error feedback is kept: bf16 costs 2 bytes per parameter and loses less
            than a hundredth of the error that it corrects; fp32 costs 4.
        backend: insist on one kernel implementation.

    Raises:
        ValueError: for settings or Megatron options that do not go together.
    """
    check_block_size(settings.block_size)
    _check_options(ddp, settings, nodes)
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    units: list[SyncUnit] = []
    for index, groups in enumerate((ddp.bucket_groups, ddp.expert_parallel_bucket_groups)):
        shared = [groups] if settings.allreduce_fusion and groups else [[g] for g in groups]
        for members in shared:
            if _process_group(members[0]).size() == 1:
                continue
            # Experts live on other data parallel groups, which the node groups do not describe.
            unit = _build_unit(
                members, settings, names, nodes if index == 0 else None,
                residual_dtype if settings.error_feedback else None, backend, len(units),
            )  # fmt: skip
            units.append(unit)
            handle = _UnitHandle(unit, len(members))
            for group in members:
                group.__class__ = Int8BucketGroup
                group.sync = handle
    return GradientCompression(units)


def _check_options(
    ddp: DistributedDataParallel, settings: GradientCompressionSettings, nodes: NodeGroups | None
) -> None:
    config = ddp.ddp_config
    where = "training.gradient_compression"
    if settings.method != "int8":
        raise ValueError(f"{where}.method is {settings.method!r}: the only method is int8")
    if config.num_distributed_optimizer_instances > 1:
        raise ValueError(
            f"{where}.enable is true with num_distributed_optimizer_instances "
            f"{config.num_distributed_optimizer_instances}: use 1, or set enable to false"
        )
    if config.reduce_scatter_with_fp32_accumulation:
        raise ValueError(
            f"{where}.enable is true with reduce_scatter_with_fp32_accumulation: both replace the "
            "reduction (int8 sums in fp32 already); switch one of them off"
        )
    if nodes is not None and not settings.hierarchical:
        raise ValueError(f"node groups were given but {where}.hierarchical is false")
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        if buffer.grad_data.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{where}.enable is true with gradients in {buffer.grad_data.dtype}: keep them in "
                "fp32 (grad_reduce_in_fp32) or bf16"
            )


def _process_group(group: _ParamAndGradBucketGroup) -> dist.ProcessGroup:
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def _build_unit(
    members: list[_ParamAndGradBucketGroup], settings: GradientCompressionSettings,
    names: dict[torch.nn.Parameter, str], nodes: NodeGroups | None,
    residual_dtype: torch.dtype | None, backend: str | None, index: int,
) -> SyncUnit:  # fmt: skip
    group, config = _process_group(members[0]), members[0].ddp_config
    buckets = [bucket for member in members for bucket in member.buckets]
    plans: list[BucketPlan] = [
        plan_bucket(
            bucket.grad_data, _exempt_ranges(bucket, names, settings.exempt), ranks=group.size(),
            block=settings.block_size, sharded=config.use_distributed_optimizer,
            min_values=settings.min_bucket_elements,
        )
        for bucket in buckets
    ]  # fmt: skip
    rules = Rules(
        group=group if nodes is None else nodes.between,
        backend=select_backend(buckets[0].grad_data.device, backend),
        block=settings.block_size, gather=not config.use_distributed_optimizer,
        factor=1.0 / group.size() if config.average_in_collective else 1.0,
        fused=settings.allreduce_fusion, stochastic=settings.stochastic_rounding,
    )  # fmt: skip
    return SyncUnit(plans, group, rules, nodes=nodes, residual_dtype=residual_dtype, index=index)


def _exempt_ranges(
    bucket: Any, names: dict[torch.nn.Parameter, str], exempt: list[str]
) -> list[tuple[int, int]]:
    """Ranges of a bucket's flat gradient that belong to exempt parameters.

    Read off where ``main_grad`` lies: the bucket's own index ignores Megatron's padding.
    """
    ranges = []
    for parameter in bucket.params_list:
        one_dimensional = "1d" in exempt and parameter.dim() <= 1
        if one_dimensional or any(fnmatch.fnmatch(names[parameter], p) for p in exempt):
            first = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
            ranges.append((first, first + parameter.main_grad.numel()))
    return sorted(ranges)
