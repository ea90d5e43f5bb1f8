"""A progress bar of bytes on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress


class Progress:
    """Shows how many of `total` bytes are done; nothing where standard error is no terminal.

    Args:
        show: False switches it off, on ranks other than the first for example.
    """

    def __init__(self, label: str, total: int, *, show: bool = True) -> None:
        console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
            TransferSpeedColumn(), TimeRemainingColumn(),
            console=console, disable=not (show and console.is_terminal), transient=False,
        )  # fmt: skip
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)
