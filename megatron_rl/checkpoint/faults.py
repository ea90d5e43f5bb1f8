"""Kills this process at a named point of a save, for tests of what a crash leaves behind.

`MEGATRON_RL_FAULT=point:count` ends the process with SIGKILL when it reaches `point` for the
`count`-th time; `point:count@rank` does so on one rank only, and `:SIGTERM` behind either sends
that signal instead. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Literal, get_args

VARIABLE = "MEGATRON_RL_FAULT"
Point = Literal[
    "before_shard", "after_shard", "before_fsync", "after_fsync", "before_manifest",
    "after_manifest", "before_rename", "after_rename", "before_latest", "after_latest",
]  # fmt: skip
POINTS: tuple[str, ...] = get_args(Point)

_reached: dict[str, int] = {}


def reach(point: Point, rank: int) -> None:
    """Counts this process's visits to `point` and sends it the signal at the asked one.

    Raises:
        ValueError: if the variable is set and cannot be understood.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    match = re.fullmatch(r"(\w+):(\d+)(?:@(\d+))?(?::(SIGKILL|SIGTERM))?", setting)
    if match is None or match[1] not in POINTS:
        raise ValueError(
            f"{VARIABLE} is {setting!r}: it must be point:count or point:count@rank, perhaps with "
            f":SIGTERM behind, and a point of {', '.join(POINTS)}"
        )
    if match[1] != point or (match[3] is not None and int(match[3]) != rank):
        return
    _reached[point] = _reached.get(point, 0) + 1
    if _reached[point] == int(match[2]):
        os.kill(os.getpid(), signal.Signals[match[4] or "SIGKILL"])
