"""Stopping a run on SIGTERM or SIGUSR1: when it may stop, and how long it has.

A signal only leaves a note; the run looks at it where it can stop. Up to the update a step changes
nothing that cannot be put back, so it is left unfinished: generation looks at the note every few
engine steps, a reward function is interrupted, the passes are left at their ends. An update that
has begun is finished. The clock of `runtime.grace_time` runs from the first signal.

Ranks must agree. Inside a replica (which does one thing) they do so over the replica's group;
`StopSignals.section` then makes it the decision of all ranks, at the end of the section.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# An agreement costs a small all-reduce over the replica; decoding steps take milliseconds.
ENGINE_STEPS_BETWEEN_LOOKS = 16

log = logging.getLogger("megatron_rl")


class StoppedBySignal(Exception):
    """The run was stopped by SIGTERM or SIGUSR1; what had to be saved is on disk."""


class StopNow(BaseException):
    """Leaves the step that is under way. No `Exception`: a reward function that survives its own
    errors must not survive this."""


class Stateful(Protocol):
    """Anything with a state that can be put back."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@contextmanager
def put_back_on_stop(*parts: Stateful) -> Iterator[None]:
    """A `StopNow` from inside leaves every part in the state that it had at the beginning."""
    before = [part.state_dict() for part in parts]
    try:
        yield
    except StopNow:
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)
        raise


class StopSignals:
    """The note that a signal leaves, and the agreement of the ranks on it.

    Args:
        grace_time: seconds from the first signal to the end of the process.
    """

    def __init__(self, grace_time: float) -> None:
        self.grace_time = grace_time
        self._first: float | None = None
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._looks = 0
        self._longest: dict[str, float] = {}
        self._warned = False
        self.everyone: dist.ProcessGroup | None = None

    def install(self) -> None:
        """From now on the signals ask for a stop. Only the main thread can do this: elsewhere
        nothing is installed."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def restore(self) -> None:
        """Gives the signals back to what handled them before; safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: object) -> None:
        # A second signal changes nothing: the stop is under way and its clock runs.
        if self._first is None:
            self._first = time.monotonic()
        if self._interruptible:
            self._interruptible = False
            raise StopNow

    @property
    def requested(self) -> bool:
        """Whether this rank was signalled."""
        return self._first is not None

    @property
    def seconds_left(self) -> float:
        """Until the process has to be gone; infinite without a signal."""
        if self._first is None:
            return float("inf")
        return self._first + self.grace_time - time.monotonic()

    def pass_on(self) -> None:
        """Another rank was signalled: the same here, from any thread."""
        if self._before and not self.requested:
            # As a real signal, which also ends what the main thread waits for.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around code of the user's: a signal ends it at once with `StopNow`."""
        try:
            self._interruptible = True
            if self.requested:
                raise StopNow
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def finishes(self, work: str) -> Iterator[None]:
        """Around work that a stop waits for; warns once when the grace time is too short for it."""
        start = time.monotonic()
        yield
        self._longest[work] = max(self._longest.get(work, 0.0), time.monotonic() - start)
        needed = sum(self._longest.values())
        if needed > self.grace_time and not self._warned:
            self._warned = True
            parts = " and ".join(f"{name} took {s:.0f} s" for name, s in self._longest.items())
            log.warning(
                "runtime.grace_time is %g s, but %s: a stop then would lose the steps since the "
                "last checkpoint; set runtime.grace_time to at least %d", self.grace_time, parts,
                1.5 * needed + 1,
            )  # fmt: skip

    def agreed(self, group: dist.ProcessGroup | None) -> bool:
        """Whether a rank of `group` (gloo) was signalled; a collective, None: this rank alone."""
        if group is None or group.size() == 1:
            return self.requested
        flag = torch.tensor([int(self.requested)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    def look(self, group: dist.ProcessGroup) -> None:
        """Called by every rank of a replica after each engine step; a collective now and then.

        Raises:
            StopNow: on all ranks of the replica alike.
        """
        self._looks += 1
        if self._looks % ENGINE_STEPS_BETWEEN_LOOKS == 0 and self.agreed(group):
            raise StopNow

    def check(self) -> None:
        """Raises `StopNow` on all ranks if one was signalled; a collective over all ranks."""
        if self.agreed(self.everyone):
            raise StopNow

    @contextmanager
    def section(self) -> Iterator[None]:
        """A part of a step that may be left unfinished; the ranks agree on that at its end.

        Raises:
            StopNow: on all ranks alike, also where the section came to its end.
        """
        try:
            yield
        except StopNow:
            # The whole replica stopped early; the other replicas learn of it below.
            assert self.agreed(self.everyone), "a stop that no rank asked for"
            raise
        self.check()
