"""What is on the device in which phase: offloads models and optimizers between their uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import torch

from megatron_rl.config import Config, ConfigError
from megatron_rl.engine.offload import (
    Offloaded,
    optimizer_tensors,
    warn_about_pageable_memory,
    weights_of,
)
from megatron_rl.models.architecture import Architecture
from megatron_rl.models.gpt import DTYPES
from megatron_rl.setup_models import Models

USES: dict[str, set[str]] = {
    "param_gather": {"actor"}, "resharding": {"actor"}, "generation": {"actor"},
    "scoring": {"reward"}, "old_logprobs": {"actor"}, "ref_logprobs": {"reference"},
    "values": {"critic"}, "advantages": set(), "update_critic": {"critic", "critic_optimizer"},
    "update_actor": {"actor", "actor_optimizer"}, "evaluation": {"actor", "reward"},
    "checkpoint": {"actor", "critic", "actor_optimizer", "critic_optimizer"},
}  # fmt: skip
"""What each phase needs."""
_FOLLOWED_BY = {
    "scoring": "old_logprobs", "old_logprobs": "ref_logprobs", "ref_logprobs": "values",
    "values": "update_critic", "advantages": "update_critic", "update_critic": "update_actor",
    "update_actor": "generation",
}  # fmt: skip
"""Whose needs are fetched meanwhile; nothing during generation: that memory is the cache's."""
OFFLOADABLE = ("actor", "critic", "reference", "reward", "optimizer")


class Residency:
    """The offloaded parts of a run; without any, phases cost nothing."""

    def __init__(self, config: Config, models: Models, device: torch.device) -> None:
        self.parts: dict[str, Offloaded] = {}
        self._needs = {phase: set(names) for phase, names in USES.items()}
        if config.algorithm.kl.estimator == "full":
            self._needs["update_actor"].add("reference")
        engine = config.hybrid_engine
        self._trainables = [t for t in (models.actor, models.critic) if t is not None]
        for role in ("actor", "critic"):
            trainable = getattr(models, role)
            if trainable is None:
                continue
            settle = trainable.finish_param_gather if trainable.gathers_params else None
            if engine.optimizer_offload.enable:
                self.parts[f"{role}_optimizer"] = Offloaded(
                    f"the {role}'s optimizer", partial(optimizer_tensors, trainable),
                    engine.optimizer_offload,
                )  # fmt: skip
            settings = getattr(engine, f"{role}_offload")
            if settings.enable:
                self._add_model(role, trainable.model, settings, settle=settle)
        for role in ("reference", "reward"):
            settings, model = getattr(engine, f"{role}_offload"), getattr(models, role)
            if settings.enable and model is not None:
                self._add_model(role, model, settings, frozen=True)
        pageable = [
            name for name in OFFLOADABLE
            if (s := getattr(engine, f"{name}_offload")).enable and not s.pin_memory
        ]  # fmt: skip
        if pageable:
            warn_about_pageable_memory(device)

    def _add_model(self, role: str, model, settings, **options) -> None:
        part = Offloaded(f"the {role}", partial(weights_of, model), settings, **options)
        part.guard(model)
        self.parts[role] = part

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Brings in what a phase needs, sends away what it does not, fetches for the next one."""
        needs = self._needs.get(name)
        if needs is None or not self.parts:
            yield
            return
        coming = self._needs[_FOLLOWED_BY[name]] if name in _FOLLOWED_BY else set()
        for key, part in self.parts.items():
            if key not in needs | coming:
                part.offload()
        for key in sorted(needs & set(self.parts)):
            self.parts[key].load()
        for key in sorted(coming & set(self.parts)):
            self.parts[key].prefetch()
        yield

    def rest(self) -> None:
        """Offloads everything and frees the gradient buffers: the state between two steps."""
        for trainable in self._trainables:
            trainable.release_gradients()
        for part in self.parts.values():
            part.offload()

    @contextmanager
    def on_device(self, *names: str) -> Iterator[None]:
        """The named parts on the device for a while; they go back to where they were."""
        away = [p for n, p in self.parts.items() if n in names and p.state != "device"]
        for part in away:
            part.load()
        yield
        for part in away:
            part.offload()


def host_bytes_needed(
    config: Config, architectures: dict[str, Architecture], world_size: int
) -> dict[str, int]:
    """Host memory of each offloaded part, by setting and per rank.

    Weights in the training dtype are spread over tp·pp ranks; main copy and two moments in fp32
    (of fp32 weights only the moments) are spread over data parallel ranks, too, under the
    distributed optimizer.
    """
    needed: dict[str, int] = {}
    dtype = DTYPES[config.training.dtype]
    for role, arch in architectures.items():
        layout = config.role_parallel(role)
        mine = arch.parameters() // (layout.tp * layout.pp)
        if getattr(config.hybrid_engine, f"{role}_offload").enable:
            needed[f"hybrid_engine.{role}_offload"] = mine * dtype.itemsize
        if role in ("actor", "critic") and config.hybrid_engine.optimizer_offload.enable:
            dp = world_size // (layout.tp * layout.pp)
            states = 8 if dtype == torch.float32 else 12
            size = mine * states // (dp if config.training.distributed_optimizer else 1)
            key = "hybrid_engine.optimizer_offload"
            needed[key] = needed.get(key, 0) + size
    return needed


def check_host_memory(
    config: Config, architectures: dict[str, Architecture], *, world_size: int,
    local_ranks: int | None = None, available: int | None = None,
) -> None:  # fmt: skip
    """Refuses offloads that this machine's memory can't hold.

    Args:
        local_ranks: processes that share the memory; default: what the launcher says.
        available: bytes; default: what the machine has now.

    Raises:
        ConfigError: with the bytes needed.
    """
    needed = host_bytes_needed(config, architectures, world_size)
    local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if available is None:
        available = psutil.virtual_memory().available
    total = sum(needed.values()) * local_ranks
    if total > available:
        largest = max(needed, key=needed.__getitem__)
        raise ConfigError(
            f"{largest}.enable is true, and offloading needs {total} bytes of host memory "
            f"({', '.join(f'{key}: {size}' for key, size in needed.items())} bytes on each of "
            f"{local_ranks} ranks), but {available} are available; offload less or start fewer "
            "ranks on this machine",
            setting=f"{largest}.enable",
        )
