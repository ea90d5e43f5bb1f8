"""One folder, one run: a second run that is pointed at a folder in use is refused.

Shared file systems (Lustre, NFS) often have no locks, so the run leaves a record of itself in the
folder and renews it every few seconds. Another run decides from it whether the first still lives:
on the same machine by its process, elsewhere by waiting to see the record renewed. A run that was
killed, or whose job was requeued, leaves a record that is taken over.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_rl import processes
from megatron_rl.checkpoint.folder import CheckpointError, write_text

RECORD = ".in_use.json"
BEAT_SECONDS = 10.0
_BEATS_OF_SILENCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who writes into a folder.

    Attributes:
        run: unique to one claim.
        machine: machine, boot and process namespace: equal ones share process numbers.
        started: the process's start time in clock ticks, since numbers are used again.
        job, restart: Slurm's job and how often it was requeued.
        beat: grows while the run lives.
    """

    run: str
    host: str
    machine: str
    pid: int
    started: str
    job: str
    restart: int
    beat: int = 0


def this_process() -> Owner:
    """A record of the calling process."""
    pid = os.getpid()
    return Owner(
        run=uuid.uuid4().hex, host=socket.gethostname(), machine=processes.machine(), pid=pid,
        started=processes.start_time(pid) or "", job=os.environ.get("SLURM_JOB_ID", ""),
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )  # fmt: skip


def read_owner(root: Path) -> Owner | None:
    """The folder's record; None if there is none that can be read."""
    try:
        return Owner(**json.loads((root / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_alive(owner: Owner, me: Owner, root: Path, beat_seconds: float) -> bool:
    """Whether the run that left `owner` still lives; may wait a few beats to see."""
    if owner.job and owner.job == me.job and owner.restart < me.restart:
        return False
    if owner.machine == me.machine:
        if (owner.pid, owner.started) == (me.pid, me.started):
            return False
        return processes.start_time(owner.pid) == owner.started
    for _ in range(_BEATS_OF_SILENCE):
        time.sleep(beat_seconds)
        now = read_owner(root)
        if now is None or (now.run, now.beat) != (owner.run, owner.beat):
            return now is not None
    return False


class Claim:
    """This process's hold on a folder; renews its record until released.

    Raises:
        CheckpointError: if another run that lives holds the folder.
    """

    def __init__(self, root: Path, *, beat_seconds: float = BEAT_SECONDS) -> None:
        self.root, self.me = root, this_process()
        self._beat_seconds = beat_seconds
        self._released = threading.Event()
        if not self._create():
            owner = read_owner(root)
            if owner is not None and is_alive(owner, self.me, root, beat_seconds):
                raise CheckpointError(
                    f"checkpoint.dir is {root}, which another run uses (process {owner.pid} on "
                    f"{owner.host}{f', job {owner.job}' if owner.job else ''}): two runs would "
                    "overwrite each other's checkpoints; give this run its own checkpoint.dir, or "
                    "end the other one"
                )
            self._write()
        self._thread = threading.Thread(target=self._renew, name="checkpoint-claim", daemon=True)
        self._thread.start()

    def _create(self) -> bool:
        """Makes the record where there is none; of two runs that start together one succeeds."""
        try:
            handle = os.open(self.root / RECORD, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as stream:
            stream.write(json.dumps(asdict(self.me)))
        return True

    def _write(self) -> None:
        write_text(self.root / RECORD, json.dumps(asdict(self.me)))

    def _renew(self) -> None:
        while not self._released.wait(self._beat_seconds):
            if not self._held():
                return
            self.me = replace(self.me, beat=self.me.beat + 1)
            try:
                self._write()
            except OSError:
                # A full or briefly unreachable file system: the next save will say so.
                continue

    def _held(self) -> bool:
        owner = read_owner(self.root)
        return owner is None or owner.run == self.me.run

    def check(self) -> None:
        """Raises `CheckpointError` if another run has taken the folder over."""
        if not self._held():
            owner = read_owner(self.root)
            raise CheckpointError(
                f"{self.root} was taken over by another run (process {owner.pid} on {owner.host}); "
                "this run does not write into it any more"
            )

    def release(self) -> None:
        """Gives the folder free."""
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            if self._held():
                (self.root / RECORD).unlink(missing_ok=True)
