"""Measure the links between ranks: point to point, all-reduce per group, clock offset.

Runs under torchrun on an initialised process group (gloo or NCCL), with all ranks together.
Legend: n ranks of a group; a, b the ranks of a pair.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..parallel import Layout
from .facts import Machine
from .link_analysis import (
    GroupSpeed,
    Link,
    check_groups,
    check_links,
    check_skew,
    tournament,
)
from .report import Report

_MIB = 2**20
# Large enough for bandwidth to dominate latency, small enough for a slow link to end soon.
_MESSAGE_BYTES = {"cpu": 4 * _MIB, "cuda": 64 * _MIB}
_PROBE_BYTES = 256 * 1024
_SLOW_PROBE_SECONDS = 0.5
_REPEATS = 3
_PINGS = 5


class LinkError(RuntimeError):
    """A pair of ranks does not answer each other; the message names them and their hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where each rank is, the same on all ranks."""

    hosts: list[str]
    nominal_gbps: dict[str, float | None]
    device: torch.device

    def ranks_by_host(self) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            groups.setdefault(host, []).append(rank)
        return groups


def measure(
    layout: Layout,
    machine: Machine,
    device: torch.device,
    min_gbps: float | None,
    timeout: float = 120.0,
) -> Report:
    """Measure everything and judge it. Every rank gets the same report.

    Args:
        layout: gives the groups whose all-reduce is measured.
        machine: facts of this rank's host.
        device: where the messages live; decides the transport.
        min_gbps: the setting `monitor.min_link_gbps`.
        timeout: seconds after which a silent link is given up.

    Raises:
        LinkError: if a pair of ranks does not answer.
    """
    place = _gather_places(machine, device)
    links = _measure_pairs(place)
    groups = _measure_groups(layout, place, timedelta(seconds=timeout))
    offsets = _clock_offsets(place)
    findings = check_links(links, place.nominal_gbps, min_gbps)
    findings += check_groups(groups, place.hosts, min_gbps)
    findings += check_skew(offsets)
    hosts = place.ranks_by_host()
    return Report(host=f"{len(hosts)} hosts, {len(place.hosts)} ranks", findings=findings)


def nominal_speed(machine: Machine) -> float | None:
    """Speed in Gbit/s of the host's network ports together: RDMA if active, else Ethernet."""
    active = [p.rate_gbps for p in machine.rdma_ports or [] if p.state == "ACTIVE" and p.rate_gbps]
    if active:
        return sum(active)
    wired = [i.speed_gbps for i in machine.interfaces if i.up and i.speed_gbps]
    return max(wired, default=None)


def _gather_places(machine: Machine, device: torch.device) -> _Place:
    everyone: list[tuple[str, float | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (machine.host, nominal_speed(machine)))
    return _Place(hosts=[host for host, _ in everyone], nominal_gbps=dict(everyone), device=device)


def _pair_rounds(place: _Place) -> list[list[tuple[int, int]]]:
    """Disjoint pairs per round: first all pairs inside each host, then host against host.

    Two hosts meet with all their ranks at once, rank i of one with rank i of the other, as data
    parallel traffic does: several network ports then show their sum.
    """
    by_host = list(place.ranks_by_host().values())
    rounds: list[list[tuple[int, int]]] = []
    for i in range(max(len(ranks) for ranks in by_host)):
        pairs = [
            (ranks[a], ranks[b])
            for ranks in by_host
            for a, b in (tournament(len(ranks))[i : i + 1] or [[]])[0]
        ]
        rounds += [pairs] if pairs else []
    for meeting in tournament(len(by_host)):
        rounds.append(
            [pair for x, y in meeting for pair in zip(by_host[x], by_host[y], strict=False)]
        )
    return [pairs for pairs in rounds if pairs]


def _measure_pairs(place: _Place) -> list[Link]:
    """All links, on every rank."""
    rank, own = dist.get_rank(), []
    for pairs in _pair_rounds(place):
        for a, b in pairs:
            if rank not in (a, b):
                continue
            hosts = (place.hosts[a], place.hosts[b])
            try:
                gbps = _pair_speed(rank, a, b, place.device)
            except RuntimeError as error:
                raise LinkError(
                    f"rank {a} on {hosts[0]} and rank {b} on {hosts[1]} do not answer each other: "
                    f"{error}"
                ) from error
            own += [Link(ranks=(a, b), hosts=hosts, gbps=gbps)] if rank == a else []
        # Without it a pair of the next round would share a wire with a slow pair of this one.
        dist.barrier()
    return [link for links in _all_gather(own) for link in links]


def _pair_speed(rank: int, a: int, b: int, device: torch.device) -> float:
    """Slower direction between a and b in Gbit/s; known to both."""
    slower = float("inf")
    for source, target in ((a, b), (b, a)):
        seconds = _one_way(rank, source, target, _PROBE_BYTES, device, repeats=1)
        size = _PROBE_BYTES
        if seconds < _SLOW_PROBE_SECONDS:
            size = _MESSAGE_BYTES[device.type]
            seconds = _one_way(rank, source, target, size, device, repeats=_REPEATS)
        slower = min(slower, size * 8 / seconds / 1e9)
    return slower


def _one_way(
    rank: int, source: int, target: int, size: int, device: torch.device, *, repeats: int
) -> float:
    """Best time of `repeats` transfers in seconds, as the source sees it, known to both.

    The source's clock stops at a one-byte answer, which the target sends once all has arrived.
    """
    data = torch.empty(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, device=device)
    times = []
    for _ in range(repeats + 1):  # the first opens the connection
        _synchronise(device)
        start = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
        else:
            dist.recv(data, source)
            dist.send(answer, source)
        _synchronise(device)
        times.append(time.perf_counter() - start)
    best = torch.tensor([min(times[1:])], dtype=torch.float64, device=device)
    if rank == source:
        dist.send(best, target)
    else:
        dist.recv(best, source)
    return max(best.item(), 1e-9)


def _measure_groups(layout: Layout, place: _Place, timeout: timedelta) -> list[GroupSpeed]:
    """All-reduce of the world and of every group of the layout, on every rank."""
    rank, own = dist.get_rank(), []
    axes = {"world": [list(range(layout.world_size))]}
    axes |= {axis: layout.group_ranks({axis}) for axis in ("tp", "dp", "pp")}
    for axis, groups in axes.items():
        for ranks in groups:
            if len(ranks) == 1 or (axis != "world" and len(ranks) == layout.world_size):
                continue
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                gbps = _all_reduce_speed(group, len(ranks), place.device)
                own += [GroupSpeed(axis=axis, ranks=tuple(ranks), gbps=gbps)] * (rank == ranks[0])
                dist.destroy_process_group(group)
        dist.barrier()
    return [speed for speeds in _all_gather(own) for speed in speeds]


def _all_reduce_speed(group: dist.ProcessGroup, n: int, device: torch.device) -> float:
    """Bus bandwidth in Gbit/s of the best of a few all-reduces."""
    size = _MESSAGE_BYTES[device.type]
    data = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(_REPEATS + 1):
        _synchronise(device)
        start = time.perf_counter()
        dist.all_reduce(data, group=group)
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return 2 * (n - 1) / n * size * 8 / min(times[1:]) / 1e9


def _clock_offsets(place: _Place) -> dict[str, float]:
    """Host → seconds its clock is ahead of the first host's; of several pings the quickest counts.

    With t0, t3 on rank 0 and t1 on the other: offset = t1 − (t0 + t3) / 2, off by half the trip.
    """
    rank, offsets = dist.get_rank(), {}
    for host, ranks in place.ranks_by_host().items():
        leader = ranks[0]
        if leader == 0:
            offsets[host] = 0.0
        elif rank in (0, leader):
            offsets[host] = _ping(rank, leader, place.device)
    return _all_gather(offsets)[0]


def _ping(rank: int, leader: int, device: torch.device) -> float:
    stamp, best = torch.zeros(1, dtype=torch.float64, device=device), (float("inf"), 0.0)
    for _ in range(_PINGS):
        if rank == 0:
            start = time.time()
            dist.send(stamp, leader)
            dist.recv(stamp, leader)
            there, end = stamp.item(), time.time()
            best = min(best, (end - start, there - (start + end) / 2))
        else:
            dist.recv(stamp, 0)
            stamp.fill_(time.time())
            dist.send(stamp, 0)
    return best[1]


def _all_gather(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
