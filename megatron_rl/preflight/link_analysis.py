"""Which link, rank or host is slow? Pure functions on measured speeds."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .report import Finding, fail, ok, unknown, warn

# Half of the nominal speed is lost by no protocol; a third of the median by no noise seen.
_SHARE_OF_NOMINAL = 0.5
_SHARE_OF_MEDIAN = 1 / 3
_MAXIMUM_SKEW_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One measured pair of ranks. `gbps` is the slower direction, in Gbit/s."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    gbps: float

    @property
    def between_hosts(self) -> bool:
        """Whether the link leaves the host."""
        return self.hosts[0] != self.hosts[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpeed:
    """All-reduce of one group: bus bandwidth in Gbit/s, 2(n−1)/n · bytes · 8 / time."""

    axis: str
    ranks: tuple[int, ...]
    gbps: float


def tournament(n: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each two of `n` players meet exactly once (circle method).

    Pairs of one round can be measured at the same time, so all n(n−1)/2 links take n−1 rounds.
    """
    players: list[int | None] = [*range(n)] + [None] * (n % 2)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def check_links(
    links: list[Link], nominal_gbps: dict[str, float | None], min_gbps: float | None
) -> list[Finding]:
    """Name slow pairs and, where the pairs point to it, the slow rank or host.

    A link between hosts is slow when all rank pairs of the two hosts together, which are measured
    at the same time, stay under half of the nominal speed. Without a nominal speed a link is slow
    below `min_gbps`; without that either, one far below the median of its kind is a warning.

    Args:
        nominal_gbps: host → speed of its network ports together, None if it does not tell.
        min_gbps: the setting `monitor.min_link_gbps`.
    """
    findings = []
    for kind, members in (
        ("between hosts", [link for link in links if link.between_hosts]),
        ("inside hosts", [link for link in links if not link.between_hosts]),
    ):
        if not members:
            continue
        by_host = kind == "between hosts"
        slow = _slow_links(members, nominal_gbps if by_host else {}, min_gbps)
        if slow:
            findings += _name_the_slow(members, slow, min_gbps, by_host=by_host)
        else:
            findings.append(_all_fast(kind, members, nominal_gbps if by_host else {}, min_gbps))
    return findings or [unknown("links", "a single rank has no links to measure")]


def _slow_links(
    links: list[Link], nominal_gbps: dict[str, float | None], min_gbps: float | None
) -> dict[Link, str]:
    """Slow link → the limit it misses, in words."""
    together: dict[tuple[str, str], float] = {}
    for link in links:
        together[link.hosts] = together.get(link.hosts, 0.0) + link.gbps
    median = statistics.median(link.gbps for link in links)
    slow = {}
    for link in links:
        speeds = [nominal_gbps.get(host) for host in link.hosts]
        nominal = None if None in speeds else min(speeds)
        if nominal is not None:
            if together[link.hosts] < _SHARE_OF_NOMINAL * nominal:
                slow[link] = f"nominal {nominal:g} Gbit/s"
        elif min_gbps is not None:
            if link.gbps < min_gbps:
                slow[link] = f"monitor.min_link_gbps is {min_gbps:g}"
        elif len(links) > 2 and link.gbps < _SHARE_OF_MEDIAN * median:
            slow[link] = f"the median is {median:.2f} Gbit/s"
    return slow


def _name_the_slow(
    links: list[Link], slow: dict[Link, str], min_gbps: float | None, *, by_host: bool
) -> list[Finding]:
    ends = (lambda link: link.hosts) if by_host else (lambda link: link.ranks)
    guilty = culprits([ends(link) for link in links], [ends(link) for link in slow])
    measured_limit = any("median" not in why for why in slow.values())
    make = fail if measured_limit else warn
    findings = []
    for end in guilty:
        theirs = [link for link in slow if end in ends(link)]
        host = (
            end
            if by_host
            else next(h for r, h in zip(theirs[0].ranks, theirs[0].hosts, strict=True) if r == end)
        )
        name = f"host {end}" if by_host else f"rank {end} on {host}"
        worst = min(theirs, key=lambda link: link.gbps)
        findings.append(
            make(
                "links",
                f"every link of {name} is slow, down to {worst.gbps:.2f} Gbit/s ({slow[worst]})",
                _without(host),
            )
        )
    for link, why in sorted(slow.items(), key=lambda item: item[0].gbps):
        if set(ends(link)) & set(guilty):
            continue
        a, b = (f"rank {r} on {h}" for r, h in zip(link.ranks, link.hosts, strict=True))
        findings.append(
            make("links", f"{a} – {b}: {link.gbps:.2f} Gbit/s ({why})", _without(link.hosts[1]))
        )
    return findings


def _without(host: str) -> str:
    return (
        f"check the cables, switch ports and NCCL_SOCKET_IFNAME/NCCL_IB_HCA there; to run "
        f"without it: sbatch --exclude={host}"
    )


def _all_fast(
    kind: str, links: list[Link], nominal_gbps: dict[str, float | None], min_gbps: float | None
) -> Finding:
    low, high = min(link.gbps for link in links), max(link.gbps for link in links)
    text = f"{len(links)} links {kind}: {low:.2f} to {high:.2f} Gbit/s"
    judged = min_gbps is not None or (
        bool(nominal_gbps) and None not in {nominal_gbps.get(h) for k in links for h in k.hosts}
    )
    if judged or len(links) > 2:
        return ok("links", text)
    return unknown(
        "links", f"{text}; there is no nominal speed to compare with (set monitor.min_link_gbps)"
    )


def culprits(pairs: Iterable[tuple], slow: Iterable[tuple]) -> list[Hashable]:
    """Ends all of whose pairs are slow, while pairs without them are not.

    With two ends, or when everything is slow, the pairs cannot tell who it is: empty.
    """
    pairs, slow = {frozenset(p) for p in pairs}, {frozenset(p) for p in slow}
    ends = sorted(set().union(*pairs), key=str)
    guilty = []
    for end in ends:
        own = {pair for pair in pairs if end in pair}
        if len(own) > 1 and own <= slow and not pairs <= own:
            guilty.append(end)
    explained = {pair for pair in pairs if pair & set(guilty)}
    return guilty if len(guilty) < len(ends) and explained != pairs else []


def check_groups(
    groups: list[GroupSpeed], hosts: list[str], min_gbps: float | None
) -> list[Finding]:
    """All-reduce speed of each axis, and its slow groups by name.

    Args:
        hosts: host of each rank.
    """
    findings = []
    for axis in dict.fromkeys(group.axis for group in groups):
        members = [group for group in groups if group.axis == axis]
        median = statistics.median(group.gbps for group in members)
        worst = min(members, key=lambda group: group.gbps)
        where = f"ranks {', '.join(map(str, worst.ranks))} on " + ", ".join(
            dict.fromkeys(hosts[rank] for rank in worst.ranks)
        )
        text = f"all-reduce over {axis}: {worst.gbps:.2f} Gbit/s in the slowest group ({where})"
        if min_gbps is not None and worst.gbps < min_gbps:
            findings.append(
                fail(
                    "groups",
                    f"{text}, monitor.min_link_gbps is {min_gbps:g}",
                    "see the slow links in this report, or lower the setting",
                )
            )
        elif len(members) > 2 and worst.gbps < _SHARE_OF_MEDIAN * median:
            findings.append(
                warn(
                    "groups",
                    f"{text}, the median group has {median:.2f}",
                    "see the slow links in this report",
                )
            )
        else:
            findings.append(ok("groups", text))
    return findings


def check_skew(offsets: dict[str, float]) -> list[Finding]:
    """Clocks of the hosts agree; `offsets` is host → seconds ahead of the first host."""
    if len(offsets) < 2:
        return []
    host, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    text = f"largest difference between hosts {abs(worst) * 1e3:.1f} ms ({host})"
    if abs(worst) > _MAXIMUM_SKEW_SECONDS:
        return [
            warn(
                "clock skew",
                text,
                f"start chronyd or ntpd on {host}: logs and traces of the hosts are merged by time",
            )
        ]
    return [ok("clock skew", text)]
