"""Whether a process of this machine still lives, also after its number was used again."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path


def machine() -> str:
    """Host, boot and process namespace: where these are equal, process numbers mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks; None if it does not live (any more)."""
    try:
        # The name in parentheses may hold anything, so fields are counted after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
