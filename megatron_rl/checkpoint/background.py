"""One piece of work in a background thread, whose error is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Starts `work` at once; `finish` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._work = work
        # Not a daemon: a program that ends normally still completes its last save.
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by finish()
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
