"""Measures the speeds that the choice of a generation layout rests on, in well under a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.parallel import ParallelGroups
from megatron_rl.resharding.cost_model import Speeds

REPEATS = 5


def measure_speeds(groups: ParallelGroups, device: torch.device, dtype: torch.dtype) -> Speeds:
    """Speeds of the slowest rank, equal on all ranks; a collective over the world."""
    on_gpu = device.type == "cuda"
    rows = 8192 if on_gpu else 1024
    weight = torch.ones(rows, rows, dtype=dtype, device=device)
    vector = torch.ones(1, rows, dtype=dtype, device=device)
    batch = weight if on_gpu else weight[:256]
    own = torch.ones((64 if on_gpu else 2) * 2**20, dtype=torch.uint8, device=device)
    size = groups.model.size()
    everyone = torch.empty(size * own.numel(), dtype=torch.uint8, device=device)
    small = torch.ones(1024, device=device)

    def seconds(call: Callable[[], object]) -> float:
        return _slowest(_median_seconds(call, device), groups, device)

    link = seconds(lambda: dist.all_gather_into_tensor(everyone, own, group=groups.model))
    return Speeds(
        link=max(everyone.nbytes - own.nbytes, 1) / link,
        latency=seconds(lambda: dist.all_reduce(small, group=groups.model)),
        read=weight.nbytes / seconds(lambda: vector @ weight),
        arithmetic=2 * len(batch) * rows**2 / seconds(lambda: batch @ weight),
    )


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        _drain(device)
        start = time.perf_counter()
        call()
        _drain(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, groups: ParallelGroups, device: torch.device) -> float:
    """Every rank must choose alike, so all take the slowest rank's time."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=groups.world)
    return float(value)
