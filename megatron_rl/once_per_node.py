"""Work that one rank of a node does for all of them, before there is a process group.

Local rank 0 does it and leaves a small note on the node's own disk; the others wait for the note,
however long the work takes. A note counts only if its writer belongs to this launch: it is still
alive, or it wrote the note after the reader was started. So what an earlier run left behind under
the same name is never mistaken for news.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config import ConfigError

# What tells the launches on one node apart.
_LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip
_POLL_SECONDS = 0.1
_REMIND_SECONDS = 60.0
# A process's start is known to the second: the kernel's boot time is.
_START_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRank:
    """A rank's place on its node.

    Attributes:
        launch: what all ranks of one launch on this node agree on, and no other launch has.
    """

    local_rank: int = 0
    local_world: int = 1
    launch: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> NodeRank:
        """From torchrun's variables, else Slurm's; without either a rank is alone."""
        rank = env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
        world = env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", env.get("SLURM_NTASKS", "1")))
        launch = "|".join(env.get(name, "") for name in _LAUNCH_VARIABLES)
        return cls(local_rank=int(rank), local_world=int(world), launch=launch)


def once_per_node(what: str, work: Callable[[], str], node: NodeRank) -> str:
    """The result of `work()`, which runs on local rank 0 only; the others wait for it.

    Args:
        what: names the work in notes and messages; equal on all ranks, different for each work.

    Raises:
        ConfigError: whatever `work` raised of that kind, on every rank of the node.
        RuntimeError: local rank 0 ended without a result.
    """
    if node.local_world == 1:
        return work()
    note = _note_path(what, node)
    if node.local_rank != 0:
        return _wait(note, what)
    _write(note, state="working")
    try:
        result = work()
    except ConfigError as error:
        _write(note, state="refused", message=str(error), setting=error.setting)
        raise
    _write(note, state="done", result=result)
    return result


def _note_path(what: str, node: NodeRank) -> Path:
    """A file in a folder of the node that belongs to this user alone."""
    folder = Path(tempfile.gettempdir()) / f"megatron-rl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} belongs to another user or others may write to it, so the ranks of this "
            "node can't talk through it; remove it or set TMPDIR to a folder of your own"
        )
    digest = hashlib.sha256(f"{node.launch}\n{what}".encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def _write(note: Path, **content: Any) -> None:
    me = {"pid": os.getpid(), "started": psutil.Process().create_time(), "time": time.time()}
    aside = note.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(me | content))
    aside.replace(note)


def _wait(note: Path, what: str) -> str:
    started, parent = psutil.Process().create_time() + _START_SECONDS, os.getppid()
    next_reminder = time.monotonic() + _REMIND_SECONDS
    while True:
        content = _read(note, started)
        if content is not None and content["state"] == "done":
            return content["result"]
        if content is not None and content["state"] == "refused":
            raise ConfigError(content["message"], setting=content["setting"])
        if content is not None and not _is_alive(content):
            raise RuntimeError(f"local rank 0 ended while it was to {what}")
        if os.getppid() != parent:
            raise RuntimeError(f"the launcher ended while local rank 0 was to {what}")
        if time.monotonic() > next_reminder:
            print(f"waiting for local rank 0 to {what}", file=sys.stderr, flush=True)
            next_reminder += _REMIND_SECONDS
        time.sleep(_POLL_SECONDS)


def _read(note: Path, started: float) -> dict[str, Any] | None:
    """The note if it is of this launch."""
    try:
        content = json.loads(note.read_text())
    except FileNotFoundError:
        return None
    return content if content["time"] >= started or _is_alive(content) else None


def _is_alive(content: Mapping[str, Any]) -> bool:
    """Whether the note's writer still runs; its number alone may belong to another by now."""
    try:
        writer = psutil.Process(content["pid"])
        is_zombie = writer.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and abs(writer.create_time() - content["started"]) < _START_SECONDS
    except psutil.NoSuchProcess:
        return False
