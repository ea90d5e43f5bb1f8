"""One thread per rank that looks after its neighbour, its own main thread and the grace time.

Ranks talk through the key-value store of the rendezvous, over a connection of their own. Each rank
counts up a number there; rank r watches the number of rank r + 1, so any set of dead ranks has a
living neighbour. Who finds something writes the verdict (the first one counts); every rank that
reads it adds its stacks and ends. Of the time between two looks some seconds count at most: a job
that Slurm suspends as a whole finds nobody dead when it goes on.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl import exit_codes, processes
from megatron_rl.stopping import StopSignals
from megatron_rl.watchdog import snapshot
from megatron_rl.watchdog.snapshot import Snapshot
from megatron_rl.watchdog.verdict import Kind, Verdict, report, summary, table

LOOK_SECONDS = 1.0
_LONGEST_LOOK = 3.0
# The groups' own timeouts end a process without a word about the others: be earlier.
SHARE_OF_COLLECTIVE_TIMEOUT = 0.9
_COLLECT_SECONDS, _LEAVE_SECONDS = 10.0, 30.0
_LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
    "Socket closed", "remote process exited", "Connection refused", "failed to recv",
)  # fmt: skip

log = logging.getLogger("megatron_rl")


class Watchdog:
    """Started once per process; `where` is replaced by whoever knows step and phase.

    Args:
        store: the rendezvous' store; None: nobody to watch, only the grace time is kept.
        silence: seconds without a sign of life after which a rank counts as dead.
        collective_timeout: of the process groups; a main thread that does not move for 90 % of it
            hangs.
        folder: for the report and this rank's stacks.
    """

    def __init__(
        self, *, rank: int, world_size: int, store: dist.Store | None, stop: StopSignals,
        silence: float, collective_timeout: float, folder: Path,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.stop_signals, self.folder = rank, world_size, stop, folder
        self.where: Callable[[], str] = lambda: "the start"
        self._store = None
        if store is not None and world_size > 1:
            # A connection of its own: the main thread may sit in a blocking request on the other.
            self._store = dist.PrefixStore("watchdog", store.clone())
            self._store.set_timeout(timedelta(seconds=silence))
        self._silence, self._still_limit = silence, SHARE_OF_COLLECTIVE_TIMEOUT * collective_timeout
        self._leaving = threading.Event()
        self._looked_at, self._passed = time.monotonic(), 0.0
        self._still_seconds, self._last_look = 0.0, ()
        self._waits_for_work = False
        self._silent_seconds, self._neighbours_count = 0.0, -1
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._store is not None:
            pid = os.getpid()
            me = [processes.machine(), pid, processes.start_time(pid)]
            self._store.set(f"process/{self.rank}", json.dumps(me))
        self._thread.start()

    def stop(self) -> None:
        """Leaves in good order; the other ranks may need longer. Safe to call twice.

        Rank 0, whose process may be the store's server, leaves last.
        """
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._thread.join()
        if self._store is None:
            return
        try:
            left = self._store.add("left", 1)
            self._store.add(f"left/{self.rank}", 1)
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self.rank == 0 and left < self.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.add("left", 0)
        except RuntimeError:
            log.info("the rendezvous store was gone before this rank left")

    @contextmanager
    def waits_for_work(self) -> Iterator[None]:
        """Around a wait of the main thread that may be long, because others have work to do."""
        self._waits_for_work = True
        try:
            yield
        finally:
            self._waits_for_work = False

    def fail(self, error: BaseException, exit_code: int) -> None:
        """This rank ends with an error: the others learn of it at once.

        Where the error only says that a peer is gone, or where another rank's verdict came first,
        the process ends here, with that verdict.
        """
        if self._leaving.is_set() or self._store is None:
            return
        crash = exit_code == exit_codes.CRASH
        if crash and _is_lost_peer(error):
            log.error("%s: %s", type(error).__name__, error)
            time.sleep(self._silence + _COLLECT_SECONDS)  # the thread finds out who, and ends this
        self._leaving.set()
        self._thread.join()
        text = f"rank {self.rank} ended with {type(error).__name__}: {error}"
        others = exit_codes.LOST_RANK if crash else exit_code
        mine = self._verdict("failed", self.rank, text, others)
        try:
            first = self._announce(mine)
        except RuntimeError:
            return
        if first != mine and crash:
            self._end(first)
        if self.rank == 0:
            time.sleep(2 * LOOK_SECONDS)  # the store may live in this process: let them read it

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving.wait(LOOK_SECONDS):
            now = time.monotonic()
            self._passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
            if self.stop_signals.seconds_left <= 0:
                self._grace_time_is_over()
            if self._store is None:
                continue
            try:
                verdict = self._look()
            except RuntimeError as error:
                if self._leaving.is_set():
                    return
                verdict = self._store_is_gone(error)
            if verdict is not None:
                self._end(verdict)

    def _look(self) -> Verdict | None:
        store = self._store
        store.add(f"beat/{self.rank}", 1)
        if store.check(["verdict"]):
            return Verdict.from_json(store.get("verdict"))
        if self.stop_signals.requested:
            store.add("stop", 1)
        elif store.check(["stop"]):
            self.stop_signals.pass_on()
        return self._neighbour() or self._own_main_thread()

    def _neighbour(self) -> Verdict | None:
        rank = (self.rank + 1) % self.world_size
        count = self._store.add(f"beat/{rank}", 0)
        silent = count == self._neighbours_count
        self._silent_seconds = self._silent_seconds + self._passed if silent else 0.0
        self._neighbours_count = count
        if self._silent_seconds < 2 * LOOK_SECONDS or self._store.add(f"left/{rank}", 0):
            return None
        if self._is_dead(rank):
            text = f"rank {rank}'s process is dead"
            return self._announce(self._verdict("silent", rank, text, exit_codes.LOST_RANK))
        if self._silent_seconds < self._silence:
            return None
        text = f"rank {rank} has given no sign of life for {self._silence:g} s"
        return self._announce(self._verdict("silent", rank, text, exit_codes.LOST_RANK))

    def _is_dead(self, rank: int) -> bool:
        """Known for processes of this machine only."""
        if not self._store.check([f"process/{rank}"]):
            return False
        machine, pid, started = json.loads(self._store.get(f"process/{rank}"))
        return machine == processes.machine() and processes.start_time(pid) != started

    def _own_main_thread(self) -> Verdict | None:
        look = snapshot.fingerprint(snapshot.main_frame())
        still = look == self._last_look and not self._waits_for_work
        self._still_seconds = self._still_seconds + self._passed if still else 0.0
        self._last_look = look
        if self._still_seconds < self._still_limit:
            return None
        text = (
            f"no progress for {self._still_seconds:.0f} s in {self.where()} (noticed by rank "
            f"{self.rank}; runtime.collective_timeout sets the limit)"
        )
        return self._announce(self._verdict("still", self.rank, text, exit_codes.CRASH))

    def _verdict(self, kind: Kind, rank: int, text: str, exit_code: int) -> Verdict:
        return Verdict(kind=kind, rank=rank, text=text, exit_code=exit_code, author=self.rank)

    def _announce(self, verdict: Verdict) -> Verdict:
        """The first verdict counts; returns that one."""
        if self._store.add("verdicts", 1) == 1:
            self._store.set("verdict", verdict.to_json())
        return Verdict.from_json(self._store.get("verdict"))

    def _store_is_gone(self, error: RuntimeError) -> Verdict:
        reason = str(error).partition("\n")[0]
        return self._verdict(
            "silent", 0,
            "the rendezvous store is gone, and with it rank 0's process or its launcher "
            f"({reason})", exit_codes.LOST_RANK,
        )  # fmt: skip

    # ---- the end -------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        stacks, collectives = snapshot.all_stacks()
        return Snapshot(
            rank=self.rank, host=socket.gethostname(), pid=os.getpid(), activity=self.where(),
            still_seconds=self._still_seconds,
            collective=collectives[0] if collectives else None,
            place=snapshot.find_place(snapshot.main_frame()),
            pending=snapshot.pending_collectives(), stacks=stacks,
        )  # fmt: skip

    def _end(self, verdict: Verdict) -> None:
        """Says what is known and ends the process; the verdict's author waits for all stacks."""
        text = verdict.text
        if verdict.kind in ("silent", "still"):
            mine = self._snapshot()
            log.error("%s\n%s", verdict.text, mine.stacks)
            try:
                text = self._report(verdict, mine)
            except RuntimeError:
                text = f"{verdict.text}\n{table({self.rank: mine}, self.world_size)}"
        log.error("%s", text)
        print(f"rank {self.rank}: ended by the watchdog: {text}", file=sys.stderr, flush=True)
        os._exit(verdict.exit_code)

    def _report(self, verdict: Verdict, mine: Snapshot) -> str:
        store = self._store
        store.set(f"snapshot/{self.rank}", mine.to_json())
        if verdict.author != self.rank:
            self._wait_until(lambda: store.check(["report"]), _COLLECT_SECONDS + 2.0)
            text = verdict.text
            if store.check(["report"]):
                text = store.get("report").decode()
            store.add("read", 1)
            if self.rank == 0:
                time.sleep(2 * LOOK_SECONDS)  # the store may live in this process
            return text
        found = {self.rank: mine}
        expected = set(range(self.world_size))
        if verdict.kind == "silent":
            expected.discard(verdict.rank)

        def complete() -> bool:
            for rank in expected - set(found):
                if store.check([f"snapshot/{rank}"]):
                    found[rank] = Snapshot.from_json(store.get(f"snapshot/{rank}"))
            return expected <= set(found)

        self._wait_until(complete, _COLLECT_SECONDS)
        file = self._write(report(verdict, found, self.world_size))
        text = f"{summary(verdict, found, self.world_size)}\nstacks of all ranks: {file}"
        store.set("report", text)
        with suppress(RuntimeError):  # the others may have gone, and the store with them
            self._wait_until(lambda: store.add("read", 0) >= len(found) - 1, 3.0)
        return text

    @staticmethod
    def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _write(self, text: str) -> Path | str:
        path = self.folder / f"watchdog-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            path.write_text(text)
        except OSError as error:
            return f"not written ({error.strerror})"
        return path

    def _grace_time_is_over(self) -> None:
        text = (
            f"runtime.grace_time ({self.stop_signals.grace_time:g} s) is over and {self.where()} "
            f"has not ended on rank {self.rank}: nothing was saved, the next start goes on from "
            "the newest checkpoint; give runtime.grace_time more than an update and a save take"
        )
        faulthandler.dump_traceback(all_threads=True)
        verdict = self._verdict("late", self.rank, text, exit_codes.REQUEUE)
        try:
            self._end(self._announce(verdict) if self._store is not None else verdict)
        except RuntimeError:
            self._end(verdict)


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone or silent."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)
