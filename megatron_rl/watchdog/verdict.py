"""Who is at fault, and the text that says so. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_rl.watchdog.snapshot import Snapshot

Kind = Literal["failed", "silent", "still", "late"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why the run ends.

    Attributes:
        kind: a rank reported an error, shows no sign of life, has a main thread that does not move,
            or did not stop within the grace time.
        rank: the rank that this is about.
        text: one sentence.
        exit_code: what every rank ends with.
        author: the rank that collects the stacks.
    """

    kind: Kind
    rank: int
    text: str
    exit_code: int
    author: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        return cls(**json.loads(text))


def culprits(snapshots: Mapping[int, Snapshot], world_size: int) -> list[str]:
    """Which ranks the others wait for, a sentence each.

    A rank that gave no snapshot is gone or frozen. Else those that stand outside of a collective
    while others stand in one keep them waiting; else the ranks stand in different collectives.
    """
    missing = [rank for rank in range(world_size) if rank not in snapshots]
    if missing:
        return [f"rank {rank} does not react: its process is gone or frozen" for rank in missing]
    waiting = {rank: s for rank, s in snapshots.items() if s.collective is not None}
    outside = {rank: s for rank, s in snapshots.items() if s.collective is None}
    if waiting and outside:
        return [
            f"rank {rank} hangs in {s.activity} at {s.place}, in no collective; "
            f"{_ranks(waiting)} for it"
            for rank, s in outside.items()
        ]
    places: dict[str, list[int]] = {}
    for rank, s in snapshots.items():
        places.setdefault(f"{s.collective or s.place} ({s.activity})", []).append(rank)
    if len(places) > 1:
        return ["the ranks wait in different places: " + "; ".join(
            f"{_ranks(found, 'stand')} in {place}" for place, found in places.items()
        )]  # fmt: skip
    return [
        f"all ranks stand in {next(iter(places))}: a link, a device, or a rank that left it early"
    ]


def _ranks(ranks: Mapping[int, object] | list[int], verb: str = "wait") -> str:
    numbers = sorted(ranks)
    shown = ", ".join(str(rank) for rank in numbers[:8]) + (" …" if len(numbers) > 8 else "")
    if len(numbers) == 1:
        return f"rank {shown} {verb}s"
    return f"ranks {shown} {verb}"


def table(snapshots: Mapping[int, Snapshot], world_size: int) -> str:
    """One line per rank."""
    lines = []
    for rank in range(world_size):
        s = snapshots.get(rank)
        if s is None:
            lines.append(f"rank {rank}: no answer")
            continue
        where = f"in {s.collective}" if s.collective else "in no collective"
        pending = f", not complete: {s.pending[0]}" if s.pending else ""
        lines.append(
            f"rank {rank} on {s.host} (process {s.pid}): {s.activity}, {where}, at {s.place}, "
            f"for {s.still_seconds:.0f} s{pending}"
        )
    return "\n".join(lines)


def report(verdict: Verdict, snapshots: Mapping[int, Snapshot], world_size: int) -> str:
    """The sentence, the culprits, the table, and every rank's stacks."""
    parts = ["\n".join([verdict.text, *culprits(snapshots, world_size)])]
    parts.append(table(snapshots, world_size))
    for rank, s in sorted(snapshots.items()):
        parts.append(f"--- stacks of rank {rank}\n{s.stacks}")
    return "\n\n".join(parts) + "\n"


def summary(verdict: Verdict, snapshots: Mapping[int, Snapshot], world_size: int) -> str:
    """The part of `report` that belongs on a terminal."""
    return report(verdict, snapshots, world_size).split("\n\n--- stacks of rank")[0].rstrip()
