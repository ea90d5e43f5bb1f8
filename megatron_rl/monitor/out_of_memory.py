"""An out-of-memory error that says where, what holds the memory, and which settings save most.

Sizes are bytes on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.optimizer import Trainable
from megatron_rl.generation.cache import CacheShape
from megatron_rl.generation.engine import Engine
from megatron_rl.models.gpt import ParallelModel

GENERATING = ("generation", "evaluation")


class ModelsOfRun(Protocol):
    """The models that a run holds."""

    actor: Trainable
    critic: Trainable | None
    reference: ParallelModel | None
    reward: ParallelModel | None
    engine: Engine


class OutOfMemory(RuntimeError):
    """The device has no room; the message names rank, phase, holders and ways out."""


@dataclass(slots=True)
class Holders:
    """What holds memory: (role, kind) → bytes, with kinds weights, gradients and optimizer.

    Attributes:
        cache: the KV cache, while generating.
        rest: everything else in use: activations above all.
    """

    states: dict[tuple[str, str], int] = field(default_factory=dict)
    cache: int = 0
    rest: int = 0

    def of(self, *kinds: str, role: str | None = None) -> int:
        """Bytes of these kinds, of one role or of all."""
        return sum(
            size for (owner, kind), size in self.states.items()
            if kind in kinds and role in (None, owner)
        )  # fmt: skip

    def largest_first(self) -> list[tuple[str, int]]:
        """(name, bytes) of everything above zero."""
        named = [(f"{kind} of the {role}", size) for (role, kind), size in self.states.items()]
        named += [("KV cache", self.cache), ("activations and everything else", self.rest)]
        return sorted([x for x in named if x[1] > 0], key=lambda x: -x[1])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch (CUDA or host) or Python ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain_out_of_memory(
    error: BaseException, phase: str, config: Config, models: ModelsOfRun | None,
    device: torch.device,
) -> OutOfMemory | None:  # fmt: skip
    """The error to show instead of `error`, or None if that is about something else.

    Args:
        models: None while they are being built.
    """
    if not is_out_of_memory(error):
        return None
    trainables, frozen, engine, dp = [], [], None, 1
    if models is not None:
        trainables = [t for t in (models.actor, models.critic) if t is not None]
        frozen = [m for m in (models.reference, models.reward) if m is not None]
        engine, dp = models.engine, models.actor.model.groups.layout.dp
    holders = measure_holders(trainables, frozen, engine, phase, device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ways = ways_out(config, holders, phase, dp)
    return explanation(error, rank=rank, phase=phase, holders=holders, ways=ways)


def measure_holders(
    trainables: Iterable[Trainable], frozen: Iterable[ParallelModel], engine: Engine | None,
    phase: str, device: torch.device,
) -> Holders:  # fmt: skip
    """Adds up the storages on `device`, each once."""
    holders, seen = Holders(), set()

    def count(role: str, kind: str, tensors: Iterable[Tensor]) -> None:
        size = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                size += storage.nbytes()
        holders.states[role, kind] = holders.states.get((role, kind), 0) + size

    trainables = list(trainables)
    for model in [*(t.model for t in trainables), *frozen]:
        count(model.role, "weights", (p.data for _, p in model.named_parameters()))
    for trainable in trainables:
        role = trainable.model.role
        count(role, "gradients", _gradients(trainable))
        count(role, "optimizer", _optimizer_tensors(trainable))
    if engine is not None and phase in GENERATING:
        shape = CacheShape.of(engine.model, blocks=1, block_size=engine.settings.block_size)
        holders.cache = engine.counts.cache_blocks * shape.bytes_per_block()
    known = sum(holders.states.values()) + holders.cache
    holders.rest = max(_used(device) - known, 0)
    return holders


def _gradients(trainable: Trainable) -> Iterator[Tensor]:
    for chunk in trainable.model.wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _optimizer_tensors(trainable: Trainable) -> Iterator[Tensor]:
    for part in trainable.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from (p.data for p in group["params"])
        for state in part.optimizer.state.values():
            yield from (x for x in state.values() if torch.is_tensor(x))


def _used(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def ways_out(config: Config, holders: Holders, phase: str, dp: int) -> list[tuple[str, int]]:
    """Settings that would lower the peak of `phase`, the largest saving first.

    Args:
        dp: data parallel size.

    Returns:
        (what to set, bytes it saves on this rank, estimated from what is held now).
    """
    training, parallel, engine = config.training, config.parallel, config.hybrid_engine
    updating = phase.startswith("update")
    found: list[tuple[str, int]] = []
    if phase in GENERATING:
        if config.rollout.kv_cache_gb is not None:
            half = config.rollout.kv_cache_gb / 2
            found.append((f"rollout.kv_cache_gb={half:g}", holders.cache // 2))
        else:
            half = config.rollout.kv_memory_fraction / 2
            found.append((f"rollout.kv_memory_fraction={half:g}", holders.cache // 2))
        tokens = config.rollout.max_batch_tokens
        if tokens > 1:
            found.append((f"rollout.max_batch_tokens={tokens // 2}", holders.rest // 2))
    elif phase == "scoring" and not config.has_learned_reward:
        pass  # a function's memory is its own affair
    elif phase not in ("advantages", "checkpoint"):
        found.append((_smaller_micro_batch(config), holders.rest // 2))
    if updating and training.recompute != "full":
        # One layer's activations instead of all: what stays is each layer's input.
        found.append(("training.recompute=full", holders.rest * 7 // 10))
    if dp > 1 and not training.distributed_optimizer:
        saved = holders.of("optimizer") * (dp - 1) // dp
        found.append(("training.grad_reduce=distributed_optimizer", saved))
    sharded = ("weights", "gradients") + (() if training.distributed_optimizer else ("optimizer",))
    more_ranks = "" if dp > 1 else " on twice as many ranks"
    found.append((f"parallel.tp={parallel.tp * 2}{more_ranks}", holders.of(*sharded) // 2))
    if config.has_reference and config.algorithm.kl.placement == "none":
        saved = holders.of("weights", role="reference")
        found.append(("model.reference.enable=false", saved))
    if training.dtype == "fp32":
        saved = (holders.of("weights") + holders.rest + holders.cache) // 2
        found.append(("training.dtype=bf16", saved))
    for name, kind, role, needed in (
        ("reference_offload", "weights", "reference", phase == "ref_logprobs"),
        ("reward_offload", "weights", "reward", phase == "scoring"),
        ("optimizer_offload", "optimizer", None, updating),
    ):
        exists = role is None or holders.of("weights", role=role) > 0
        if exists and not needed and not getattr(engine, name).enable:
            what = f"hybrid_engine.{name}={{enable: true, offload_device: cpu}}"
            found.append((what, holders.of(kind, role=role)))
    return sorted(found, key=lambda way: -way[1])


def _smaller_micro_batch(config: Config) -> str:
    training = config.training
    tokens, samples = training.max_tokens_per_micro_batch, training.micro_batch_size
    if tokens is not None:
        return f"training.max_tokens_per_micro_batch={max(tokens // 2, 1)}"
    if samples is not None and samples > 1:
        return f"training.micro_batch_size={samples // 2}"
    if samples is None:
        return f"training.micro_batch_size={max(config.mini_batch_size // 4, 1)}"
    return f"rollout.max_new_tokens={max(config.rollout.max_new_tokens // 2, 1)}"


def explanation(
    error: BaseException, *, rank: int, phase: str, holders: Holders, ways: list[tuple[str, int]]
) -> OutOfMemory:
    """The error that is shown instead of the bare one."""
    held = ", ".join(f"{name} {_size(size)}" for name, size in holders.largest_first()[:5])
    ways_text = "; ".join(f"{what} (about {_size(size)})" for what, size in ways[:3])
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return OutOfMemory(
        f"rank {rank} ran out of memory in phase {phase}. It holds: {held or 'nothing yet'}. "
        f"What would save most here: {ways_text}. ({first_line})"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
