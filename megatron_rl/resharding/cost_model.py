"""Which generation layout is fastest: an estimate from measured speeds, shown with its arithmetic.

For a training replica of t·p ranks with S sequences of L new tokens each, a layout of t_g × p_g
makes t·p/(t_g·p_g) generation replicas with b = S·t_g·p_g/(t·p) sequences each. One decode step is
bound by reading the weights or by the arithmetic, plus what the ranks exchange:

  compute   max(M/t_g / read, 2·N·b/t_g / arithmetic), all p_g stages one after the other
  exchange  2 all-reduces per layer of b·H·e bytes over t_g ranks: latency + 2(t_g−1)/t_g·b·H·e/link
            and p_g − 1 hand-overs from stage to stage

with M the bytes and N the number of parameters, H the hidden size and e bytes per element. Steps:
L for each wave of at most `max_running` sequences. Going there costs received bytes / link, by
the zero-redundancy volume (`volumes.micro_dp_bytes`). Prefill costs every layout the same
arithmetic per rank and is left out.

Units: bytes, seconds, operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.resharding.volumes import micro_dp_bytes, peak_weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What was measured on the slowest rank.

    Attributes:
        link: bytes per second that a rank receives in an all-gather over its training replica.
        latency: seconds of a small all-reduce there.
        read: bytes of weights per second that a matrix-vector product reads.
        arithmetic: operations per second of a large matrix product.
    """

    link: float
    latency: float
    read: float
    arithmetic: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rollout generates on one training replica.

    Attributes:
        model_bytes, parameters, layers, hidden, element_bytes: of the actor.
        sequences: samples of the training replica.
        new_tokens: expected tokens per response.
        max_running: sequences that decode together on one generation replica.
        free_bytes: memory of a rank for gathered weights.
    """

    model_bytes: int
    parameters: int
    layers: int
    hidden: int
    element_bytes: int
    sequences: int
    new_tokens: int
    max_running: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of one rollout on a layout; `fits` is False where gathered weights have no room."""

    tp: int
    pp: int
    resharding: float
    compute: float
    exchange: float
    steps: int
    extra_bytes: int
    fits: bool

    @property
    def seconds(self) -> float:
        return self.resharding + self.steps * (self.compute + self.exchange)

    def __str__(self) -> str:
        text = (
            f"tp={self.tp} pp={self.pp}: {self.seconds:.4g} s = {self.resharding:.4g} s resharding "
            f"+ {self.steps} steps × ({1e3 * self.compute:.4g} ms compute + "
            f"{1e3 * self.exchange:.4g} ms exchange), {self.extra_bytes} bytes more"
        )
        return text if self.fits else f"{text} (does not fit)"


def estimate(work: Work, speeds: Speeds, *, t: int, p: int, t_g: int, p_g: int) -> Estimate:
    """The cost of generating at (t_g, p_g) what was trained at (t, p)."""
    replicas = t * p // (t_g * p_g)
    sequences = math.ceil(work.sequences / replicas)
    running = min(sequences, work.max_running)
    activation = running * work.hidden * work.element_bytes
    reading = work.model_bytes / t_g / speeds.read
    compute = max(reading, 2 * work.parameters * running / t_g / speeds.arithmetic)
    exchange = 0.0
    if t_g > 1:
        wire = 2 * (t_g - 1) / t_g * activation / speeds.link
        exchange += 2 * work.layers * (speeds.latency + wire)
    exchange += (p_g - 1) * (speeds.latency + activation / speeds.link)
    received = micro_dp_bytes(work.model_bytes, t, p, t_g, p_g)
    extra = int(peak_weight_bytes(work.model_bytes, t_g, p_g)) if replicas > 1 else 0
    return Estimate(
        tp=t_g, pp=p_g, resharding=float(received) / speeds.link, compute=compute,
        exchange=exchange, steps=work.new_tokens * math.ceil(sequences / work.max_running),
        extra_bytes=extra, fits=extra <= work.free_bytes,
    )  # fmt: skip


def choose(
    work: Work, speeds: Speeds, *, t: int, p: int, layouts: Sequence[tuple[int, int]]
) -> tuple[Estimate, list[Estimate]]:
    """The fastest layout that fits, and all estimates, fastest first.

    The training layout always fits and is a candidate only if `layouts` has it.

    Raises:
        ValueError: if no candidate fits.
    """
    estimates = sorted(
        (estimate(work, speeds, t=t, p=p, t_g=t_g, p_g=p_g) for t_g, p_g in layouts),
        key=lambda e: (e.seconds, -e.tp * e.pp),
    )
    best = next((e for e in estimates if e.fits), None)
    if best is None:
        raise ValueError(
            f"hybrid_engine.mode is auto, and no generation layout of {list(layouts)} has room for "
            f"its weights in {work.free_bytes} bytes; set hybrid_engine.mode=zero_repartitioning"
        )
    return best, estimates
