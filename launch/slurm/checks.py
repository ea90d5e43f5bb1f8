"""Refuse a job that cannot run, before it waits in a queue. Pure except for asking `sinfo`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from .render import Job, SubmitError

_UNLIMITED = ("UNLIMITED", "INFINITE", "NOT_SET")


def seconds(time: str) -> int | None:
    """Seconds of a Slurm time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Returns:
        None for no limit.

    Raises:
        SubmitError: it is none of these.
    """
    if time.upper() in _UNLIMITED or time == "0":
        return None
    days, dash, rest = time.partition("-")
    parts = (rest if dash else days).split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        raise SubmitError(
            f"--time is {time!r}: give minutes, MM:SS, HH:MM:SS or D-HH:MM:SS, e.g. 24:00:00"
        )
    numbers = [int(part) for part in parts]
    if dash and len(numbers) <= 3:
        hours, minutes, secs = (numbers + [0, 0])[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + secs
    if len(numbers) > 3:
        raise SubmitError(f"--time is {time!r}: it has too many fields; e.g. 24:00:00")
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def check_time(job: Job, grace: float) -> None:
    """The job has time for more than stopping.

    Raises:
        SubmitError: the time limit is not longer than the stop takes.
    """
    limit = seconds(job.time)
    if limit is not None and limit <= job.signal_seconds:
        raise SubmitError(
            f"--time {job.time} is {limit} s, but stopping takes up to {job.signal_seconds} s "
            f"(runtime.grace_time {grace:g} s and margins): give a longer --time or lower "
            "runtime.grace_time"
        )


def check_gpus(gpus: int | None, nodes: int, gpus_per_node: int) -> None:
    """--gpus, when given, is nodes × GPUs per node.

    Raises:
        SubmitError: it is not.
    """
    if gpus is not None and gpus != nodes * gpus_per_node:
        fits = (
            f"--nodes {gpus // gpus_per_node}"
            if gpus_per_node and not gpus % gpus_per_node
            else (f"--gpus {nodes * gpus_per_node}")
        )
        raise SubmitError(
            f"--gpus is {gpus}, but {nodes} nodes × {gpus_per_node} GPUs per node are "
            f"{nodes * gpus_per_node}: give {fits}"
        )


def partitions() -> dict[str, str] | None:
    """Partition → its time limit, from `sinfo`; None where there is no Slurm to ask."""
    if shutil.which("sinfo") is None:
        return None
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%R|%l"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    rows = (line.strip().split("|") for line in done.stdout.splitlines() if "|" in line)
    return {name: limit for name, limit in rows}


def check_partition(job: Job, known: Mapping[str, str]) -> None:
    """The partition exists and lets the job run that long.

    Raises:
        SubmitError: it does not.
    """
    if job.partition is None:
        return
    # Slurm takes a list and starts the job where it can first.
    for name in job.partition.split(","):
        if name not in known:
            raise SubmitError(
                f"--partition {name} does not exist; sinfo knows: {', '.join(sorted(known))}"
            )
        allowed, asked = seconds(known[name].upper()), seconds(job.time)
        if allowed is not None and (asked is None or asked > allowed):
            raise SubmitError(
                f"--time {job.time} is longer than partition {name} allows ({known[name]}): "
                "shorten it; the job is requeued and resumes as often as needed"
            )
