"""What a configuration will ask of this host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..config import Config
from .facts import Plan

# Per parameter, as Megatron-Core's checkpoint stores it: fp32 master weight and two Adam moments
# (12 bytes), and the 16-bit weight that is trained with.
_CHECKPOINT_BYTES_PER_PARAMETER = 14
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def make_plan(config: Config | None, environment: Mapping[str, str]) -> Plan:
    """Combine the settings with the sizes that torchrun or Slurm put into the environment."""
    ranks = _first_integer(environment, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE") or 1
    world = _first_integer(environment, "WORLD_SIZE")
    hosts = -(-world // ranks) if world else _first_integer(environment, "SLURM_JOB_NUM_NODES") or 1
    if config is None:
        return Plan(ranks_on_host=ranks, hosts=hosts)
    return Plan(
        needs_gpu={"cuda": True, "cpu": False, "auto": None}[config.runtime.device],
        ranks_on_host=ranks,
        hosts=hosts,
        checkpoint_dir=config.checkpoint_dir,
        checkpoint_bytes=_checkpoint_bytes(config),
        checkpoints_kept=config.checkpoint.keep_last,
        tensor_parallel=config.parallel.tp,
        pipeline_parallel=config.parallel.pp,
        min_link_gbps=config.monitor.min_link_gbps,
    )


def _checkpoint_bytes(config: Config) -> int | None:
    roles = ["actor", "critic"] if config.has_critic else ["actor"]
    sizes = [_parameters(config.role_path(role)) for role in roles]
    if any(size is None for size in sizes):
        return None
    return sum(sizes) * _CHECKPOINT_BYTES_PER_PARAMETER


def _parameters(path: str | None) -> int | None:
    """Number of parameters in a Hugging Face folder, from the sizes of its files."""
    folder = Path(path) if path else None
    if folder is None or not folder.is_dir():
        return None
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "bfloat16"
    return stored // _BYTES.get(dtype, 2) or None


def _first_integer(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return None
