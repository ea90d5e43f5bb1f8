"""Look up the state of this host. Reads /sys, /proc and nvidia-smi; each may be missing."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path

from .facts import Gpu, Interface, Machine, RdmaPort

_SMI_SECONDS = 10
_STA_UNSYNC, _TIME_ERROR = 0x0040, 5
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "memory": "memory.total",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "pending": "remapped_rows.pending",
    "failed": "remapped_rows.failure",
    "slowdown": "clocks_event_reasons.hw_slowdown",
}


def gather_machine(checkpoint_dir: Path | None, *, sys_root: Path = Path("/sys")) -> Machine:
    """Facts about this host; `checkpoint_dir` need not exist yet."""
    shared = _usage(Path("/dev/shm"))
    folder = _existing_parent(checkpoint_dir) if checkpoint_dir else None
    disk = _usage(folder) if folder else None
    return Machine(
        host=socket.gethostname(),
        interfaces=interfaces(sys_root / "class/net"),
        rdma_ports=rdma_ports(sys_root / "class/infiniband"),
        gpus=gpus(),
        limits=limits(),
        shared_memory_total=shared.total if shared else None,
        shared_memory_free=shared.free if shared else None,
        clock_synchronised=clock_synchronised(),
        disk_free=disk.free if disk else None,
        checkpoint_dir_writable=os.access(folder, os.W_OK) if folder else None,
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _usage(path: Path):
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def interfaces(folder: Path) -> list[Interface]:
    """Network interfaces from a folder like /sys/class/net, sorted by name."""
    found = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not entry.is_dir():  # bonding_masters is a file
            continue
        # The state of `lo` and of many virtual devices is "unknown" while they work.
        up = (_read(entry / "operstate") or "unknown") in ("up", "unknown")
        speed = _read(entry / "speed")
        known = speed is not None and speed.lstrip("-").isdigit() and int(speed) > 0
        gbps = int(speed) / 1000 if known else None
        found.append(Interface(name=entry.name, up=up, speed_gbps=gbps))
    return found


def rdma_ports(folder: Path) -> list[RdmaPort] | None:
    """RDMA ports from a folder like /sys/class/infiniband; None without an RDMA subsystem.

    The files read `4: ACTIVE`, `5: LinkUp` and `400 Gb/sec (4X NDR)`.
    """
    if not folder.is_dir():
        return None
    ports = []
    for path in sorted(folder.glob("*/ports/*")):
        rate = (_read(path / "rate") or "").split()
        ports.append(
            RdmaPort(
                device=path.parent.parent.name,
                port=int(path.name),
                state=(_read(path / "state") or "?").split(": ")[-1],
                physical_state=(_read(path / "phys_state") or "?").split(": ")[-1],
                rate_gbps=float(rate[0]) if rate else None,
                link_layer=_read(path / "link_layer") or "?",
            )
        )
    return ports


def gpus() -> list[Gpu] | None:
    """GPUs and their health from nvidia-smi, without creating a CUDA context."""
    command = ["nvidia-smi", "--format=csv,noheader,nounits"]
    for fields in (list(_GPU_FIELDS.values()), list(_GPU_FIELDS.values())[:3]):
        # Older drivers refuse the whole query for one field they do not know.
        try:
            done = subprocess.run(
                [*command, f"--query-gpu={','.join(fields)}"],
                capture_output=True,
                text=True,
                timeout=_SMI_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return parse_gpus(done.stdout)
    return None


def parse_gpus(csv: str) -> list[Gpu]:
    """Rows of `nvidia-smi --format=csv,noheader,nounits` with the fields asked for above."""
    found = []
    for line in csv.strip().splitlines():
        row = dict(zip(_GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        ecc = row.get("ecc", "")
        found.append(
            Gpu(
                index=int(row["index"]),
                name=row["name"],
                memory_gib=float(row["memory"]) / 1024 if row["memory"].isdigit() else 0.0,
                uncorrected_ecc_errors=int(ecc) if ecc.isdigit() else None,
                remapping_pending=_yes(row.get("pending")),
                remapping_failed=_yes(row.get("failed")),
                hardware_slowdown=_yes(row.get("slowdown")),
            )
        )
    return found


def _yes(cell: str | None) -> bool | None:
    answers = {"yes": True, "1": True, "active": True, "no": False, "0": False, "not active": False}
    return answers.get((cell or "").lower())


def limits() -> dict[str, int | None]:
    """Soft limits that matter to a run; None means unlimited."""
    names = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}
    found: dict[str, int | None] = {}
    for name, constant in names.items():
        soft, _ = resource.getrlimit(getattr(resource, constant))
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def clock_synchronised() -> bool | None:
    """Whether the kernel's clock is disciplined by NTP or PTP, from adjtimex(2)."""
    # struct timex is 208 bytes; `modes` (first int) 0 only reads, `status` is the int at byte 40.
    buffer = ctypes.create_string_buffer(256)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = int.from_bytes(buffer.raw[40:44], "little")
    return state != _TIME_ERROR and not status & _STA_UNSYNC
