"""This rank's log file, and what the terminal shows of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from megatron_rl.stopping import StoppedBySignal

log = logging.getLogger("megatron_rl")


class RankLog:
    """`run_dir/logs/rank_*.log`; rank 0's terminal also gets warnings."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._file: logging.FileHandler | None = None
        self._written: BaseException | None = None

    def open(self, folder: Path) -> None:
        """From now on everything that is logged goes into this rank's file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = logging.FileHandler(folder / f"rank_{self.rank:05d}.log")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self._file)
        if self.rank == 0:
            console = logging.StreamHandler(sys.stderr)
            console.setLevel(logging.WARNING)
            console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            log.addHandler(console)

    def write_failure(self, error: BaseException | None) -> None:
        """An error that ends the run, with its traceback, into the file alone and once.

        The terminal gets it from whoever catches it.
        """
        if error is None or error is self._written or isinstance(error, StoppedBySignal):
            return
        self._written = error
        if self._file is not None:
            traceback = (type(error), error, error.__traceback__)
            words, values = "rank %d failed", (self.rank,)
            self._file.handle(
                log.makeRecord(log.name, logging.ERROR, __file__, 0, words, values, traceback)
            )

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        for handler in list(log.handlers):
            handler.close()
            log.removeHandler(handler)
        self._file = None
