"""One step's measurements of all ranks, brought together on each of them.

Shapes: R ranks, P phases (in the order of `PHASES`), F fields of `PhaseUse`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.monitor.phases import FIELDS, PHASES, PhaseUse

EXTRA = ("busy_share", "watts", "elapsed", "eta")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTable:
    """Measurements of all ranks, the same on each.

    Attributes:
        uses_RPF: float64, NaN for phases that a rank did not run.
        extra: `EXTRA` name → float64 `[R]`, NaN where it could not be read.
    """

    uses_RPF: Tensor
    extra: dict[str, Tensor]

    @property
    def ran(self) -> list[str]:
        """Phases that some rank ran."""
        return [p for i, p in enumerate(PHASES) if not self._column(i, "seconds").isnan().all()]

    def column(self, phase: str, field: str) -> Tensor:
        """One field of a phase that ran, 0 on ranks that did not run it; `[R]`."""
        return self._column(PHASES.index(phase), field).nan_to_num(nan=0.0)

    def _column(self, phase: int, field: str) -> Tensor:
        return self.uses_RPF[:, phase, FIELDS.index(field)]


def gather_table(
    uses: dict[str, PhaseUse], extra: dict[str, float], device: torch.device
) -> RankTable:
    """Brings this rank's measurements to all ranks; a collective over all of them.

    Args:
        device: where the process group's backend wants its tensors.
    """
    mine = torch.full((len(PHASES), len(FIELDS)), math.nan, dtype=torch.float64)
    for name, use in uses.items():
        row = [float(getattr(use, field)) for field in FIELDS]
        mine[PHASES.index(name)] = torch.tensor(row, dtype=torch.float64)
    tail = torch.tensor([extra[name] for name in EXTRA], dtype=torch.float64)
    flat = torch.cat((mine.reshape(-1), tail)).to(device)
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    all_R = torch.stack(parts).cpu()
    uses_RPF = all_R[:, : mine.numel()].reshape(-1, *mine.shape)
    tails = all_R[:, mine.numel() :].unbind(1)
    return RankTable(uses_RPF=uses_RPF, extra=dict(zip(EXTRA, tails, strict=True)))


def slowest_seconds(table: RankTable) -> dict[str, float]:
    """Seconds of the slowest rank, by phase."""
    return {phase: float(table.column(phase, "seconds").max()) for phase in table.ran}


def rank_metrics(table: RankTable, *, on_gpu: bool) -> dict[str, float]:
    """Everything that a step's table says about the ranks."""
    return (
        time_metrics(table) | straggler_metrics(table) | memory_metrics(table, on_gpu=on_gpu)
        | hardware_metrics(table)
    )  # fmt: skip


def time_metrics(table: RankTable) -> dict[str, float]:
    """Mean seconds over ranks, and the longest against the median, by phase."""
    metrics = {}
    for phase in table.ran:
        seconds_R = table.column(phase, "seconds")
        metrics[f"perf/{phase}_seconds"] = float(seconds_R.mean())
        metrics[f"spread/{phase}"] = float(seconds_R.max() / seconds_R.median().clamp(min=1e-9))
    return metrics


def memory_metrics(table: RankTable, *, on_gpu: bool) -> dict[str, float]:
    """Peak GB of each phase on the rank where it is largest, and of the whole step."""
    fields = ("allocated", "reserved", "fragmented") if on_gpu else ("resident",)
    metrics = {
        f"memory/{phase}_{field}_gb": float(table.column(phase, field).max()) / 1e9
        for phase in table.ran
        for field in fields
    }
    for field, tag in (("resident", "host_memory_gb"), ("allocated", "gpu_memory_gb")):
        if field == "resident" or on_gpu:
            worst = max((float(table.column(p, field).max()) for p in table.ran), default=0.0)
            metrics[f"perf/{tag}"] = worst / 1e9
    return metrics


def hardware_metrics(table: RankTable) -> dict[str, float]:
    """Busy share of the devices, its extremes over ranks, and the power of all together."""
    metrics = {}
    busy_R = table.extra["busy_share"]
    if not bool(busy_R.isnan().any()):
        metrics["hardware/busy_share"] = float(busy_R.mean())
        metrics["hardware/busy_share_min"] = float(busy_R.min())
        metrics["hardware/busy_share_max"] = float(busy_R.max())
    watts_R = table.extra["watts"]
    if not bool(watts_R.isnan().any()):
        metrics["hardware/power_watts"] = float(watts_R.sum())
    return metrics


def straggler_metrics(table: RankTable) -> dict[str, float]:
    """The rank that others wait for, and what it costs per step.

    A late rank makes the others wait in a later phase, which then looks long on *them*. Causes come
    before effects: of the phases with a comparable loss, the first one counts. Ranks within 5 % of
    the longest (those of one replica wait for each other) count as one: the lowest.
    """
    lost: list[tuple[float, int]] = []
    for phase in table.ran:
        seconds_R = table.column(phase, "seconds")
        longest = seconds_R.max()
        rank = int((seconds_R >= 0.95 * longest).nonzero()[0])
        lost.append((float(longest - seconds_R.median()), rank))
    if not lost:
        return {}
    most = max(seconds for seconds, _ in lost)
    seconds, rank = next(pair for pair in lost if pair[0] >= 0.5 * most)
    return {"spread/straggler_seconds": seconds, "spread/straggler_rank": float(rank)}
