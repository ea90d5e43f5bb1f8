"""What a rank is doing at this moment, read off its threads' stacks without its help."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_PIPELINE = "pipeline_parallel/p2p_communication.py"
_FOREIGN = ("site-packages", "cuda_on_cpu.py", sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One rank at one moment.

    Attributes:
        activity: step and phase, as the trainer names them.
        still_seconds: how long its main thread has been where it is.
        collective: the collective that a thread waits in and the ranks of its group; None: in none.
        place: innermost line of this package or of the user's code.
        pending: collectives that were issued and are not complete, oldest first, where torch's
            flight recorder knows.
        stacks: every thread's stack.
    """

    rank: int
    host: str
    pid: int
    activity: str
    still_seconds: float
    collective: str | None
    place: str
    pending: list[str]
    stacks: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        return cls(**json.loads(text))


def main_frame() -> FrameType | None:
    """Innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident)


def fingerprint(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Equal for two looks at a thread that did not move in between; work leaves other frames or
    instructions somewhere in its stack."""
    marks = []
    while frame is not None:
        marks.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(marks)


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def find_collective(innermost: FrameType | None) -> str | None:
    """The collective that a thread stands in, as "all_reduce over ranks [0, 1]"."""
    found = None
    for frame in _outwards(innermost):
        file = frame.f_code.co_filename.replace("\\", "/")
        if file.endswith(_COLLECTIVES) and not frame.f_code.co_name.startswith(("_", "wrapper")):
            found = f"{frame.f_code.co_name} over ranks {_ranks_of(frame.f_locals.get('group'))}"
        elif file.endswith(_PIPELINE) and found is None:
            found = "a pipeline send or receive"
    return found


def _ranks_of(group: object) -> list[int] | str:
    try:
        return dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
    except (RuntimeError, ValueError, KeyError):
        return "of a group that is gone"


def find_place(innermost: FrameType | None) -> str:
    """Innermost line outside of installed packages and the standard library."""
    frames = _outwards(innermost)
    own = [f for f in frames if not any(part in f.f_code.co_filename for part in _FOREIGN)]
    if not frames:
        return "no Python code"
    frame = (own or frames)[0]
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def all_stacks() -> tuple[str, list[str]]:
    """Every thread's stack as text, and the collectives that threads of this process stand in.

    The main thread comes first. The calling thread is left out. Autograd runs parts of a backward
    pass in threads of its own.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    texts, collectives = [], []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        texts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
        if names.get(ident) != "checkpoint-writer" and (found := find_collective(frame)):
            collectives.append(found)
    return "\n".join(texts), collectives


def pending_collectives() -> list[str]:
    """From torch's flight recorder (`TORCH_FR_BUFFER_SIZE`); empty where it has none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    except (RuntimeError, ValueError, TypeError):
        return []
    return [
        f"{e['profiling_name']} number {e['collective_seq_id']} of group {e['process_group'][0]}"
        for e in entries if not e.get("retired") and e.get("state") != "completed"
    ]  # fmt: skip
