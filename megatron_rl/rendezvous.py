"""A task started by `srun` gets the variables that torchrun would have set.

Everything else in the program reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT only.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import MutableMapping

from megatron_rl.config import ConfigError

_FIRST_PORT, _PORTS = 10000, 20000  # below the ephemeral range, which starts at 32768


def adopt_slurm_variables(environ: MutableMapping[str, str]) -> None:
    """Fills in what is missing, in a job step of several tasks that torchrun did not start.

    A batch script has SLURM_PROCID, too, but is no job step.

    Raises:
        ConfigError: a variable of Slurm's that is needed is missing or no number.
    """
    if "RANK" in environ or "SLURM_STEP_ID" not in environ:
        return
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if world == 1:
        return
    environ["WORLD_SIZE"] = str(world)
    environ["RANK"] = str(_number(environ, "SLURM_PROCID"))
    environ["LOCAL_RANK"] = str(_number(environ, "SLURM_LOCALID"))
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
    environ["LOCAL_WORLD_SIZE"] = str(tasks[int(environ.get("SLURM_NODEID", "0"))])
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        environ["MASTER_ADDR"] = "127.0.0.1" if len(tasks) == 1 else _address(first_node(nodes))
    environ.setdefault("MASTER_PORT", str(port_of(_number(environ, "SLURM_JOB_ID"))))


def port_of(job_id: int) -> int:
    """The rendezvous port of a job: two jobs on one node do not meet."""
    return _FIRST_PORT + job_id % _PORTS


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1].

    Raises:
        ConfigError: it has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is not of the form 2(x3),1; start "
                "with torchrun instead"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """The first name of Slurm's compressed list, such as rack1-[03-07,9],gpu2."""
    depth, end = 0, len(nodes)
    for i, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = i
            break
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes[:end])
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", first):
        raise ConfigError(
            f"SLURM_STEP_NODELIST is {nodes!r}, which names no node; set MASTER_ADDR to the "
            "address of rank 0's node"
        )
    return first


def _address(node: str) -> str:
    """A node's name where it resolves; else the address at which Slurm reaches it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol") is not None:
        shown = subprocess.run(
            ["scontrol", "show", "node", node, "-o"], capture_output=True, text=True, timeout=20
        ).stdout
        if match := re.search(r"\bNodeAddr=(\S+)", shown):
            return match[1]
    return node


def _number(environ: MutableMapping[str, str], *names: str) -> int:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise ConfigError(
                    f"{name} is {environ[name]!r}, which is no whole number; start with torchrun "
                    "or srun"
                ) from None
    raise ConfigError(
        f"this is a Slurm job step, but {' and '.join(names)} is not set; start with torchrun or "
        "srun"
    )
