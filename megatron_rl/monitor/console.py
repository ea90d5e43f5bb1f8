"""The terminal: a progress bar that names the phase, and one line per step.

Where the output is no terminal (a Slurm log), only the lines are printed.
"""

from __future__ import annotations

import sys
import time
from typing import IO

_SHOWN = (
    ("reward", "reward/mean", ".3f"), ("kl", "kl/ref", ".4f"),
    ("entropy", "policy/entropy", ".3f"), ("clip", "policy/clipfrac", ".3f"),
    ("value loss", "value/loss", ".4f"), ("length", "length/response_mean", ".1f"),
    ("s", "perf/step_seconds", ".1f"), ("tok/s", "perf/tokens_per_second", ".0f"),
)  # fmt: skip


def step_line(step: int, total: int, metrics: dict[str, float], now: float) -> str:
    """The summary of a step.

    Args:
        now: seconds since the epoch, from which the end is counted.
    """
    parts = [f"{name} {metrics[key]:{form}}" for name, key, form in _SHOWN if key in metrics]
    left = metrics.get("perf/eta_seconds")
    if left is not None:
        end = time.localtime(now + left)
        form = "%H:%M" if left < 12 * 3600 else "%a %H:%M" if left < 5 * 86400 else "%Y-%m-%d"
        parts.append(f"{duration(left)} left, ends {time.strftime(form, end)}")
    return f"step {step}/{total} · " + " · ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3.5 min` or `7.2 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


class Console:
    """One line per step, and in a terminal a progress bar with the phase and the time left."""

    def __init__(self, total_steps: int, first_step: int, file: IO[str] | None = None) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        file = file or sys.stdout
        in_terminal = file.isatty()
        self.rich = RichConsole(file=file, width=None if in_terminal else 160)
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.fields[phase]:<13}"), BarColumn(),
            MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=self.rich, disable=not in_terminal,
        )  # fmt: skip
        self.total = total_steps
        self.task = self.progress.add_task(
            "steps", total=total_steps, completed=first_step, phase="start"
        )
        self.progress.start()

    def phase(self, name: str) -> None:
        self.progress.update(self.task, phase=name.replace("_", " "))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.note(step_line(step, self.total, metrics, time.time()))
        self.progress.update(self.task, completed=step)

    def note(self, text: str) -> None:
        """A line of its own, above the progress bar."""
        self.rich.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        self.progress.stop()
