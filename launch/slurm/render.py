"""An sbatch file for one run: a template of this folder with its settings filled in. Pure.

Nothing of a user's goes into the file unquoted: settings become shell words (`shlex.quote`), and
`#SBATCH` values are refused unless they are plain words, because Slurm's own quoting there is not
the shell's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent
_SETTINGS_START, _SETTINGS_END = "# --- settings", "# --- end of settings"
_PLAIN = re.compile(r"[A-Za-z0-9_.,:@%=+/\[\]-]+")
_PATH = re.compile(r"[^\n\r\"\\#]+")


class SubmitError(ValueError):
    """The job as asked for cannot run; the message names the option and the way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What Slurm is asked for."""

    template: str
    """File name of the template in this folder."""
    name: str
    nodes: int
    gpus_per_node: int
    """0: a cluster without GPUs."""
    ranks_per_node: int
    cpus_per_node: int
    time: str
    output: str
    """Slurm's own log; %j is the job id."""
    signal_seconds: int
    """How long before the time limit the job is told to stop."""
    launcher: str = "torchrun"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclude: str | None = None
    constraint: str | None = None
    array: str | None = None
    settings: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Shell settings of the template; a sequence becomes a bash array."""


def render(job: Job) -> str:
    """The text of the sbatch file.

    Raises:
        SubmitError: a value cannot stand in an #SBATCH line.
    """
    lines = (TEMPLATES / job.template).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(_SETTINGS_START))
    end = lines.index(_SETTINGS_END)
    # The head of a template is comments and its own #SBATCH lines; `set` is its first command.
    first_command = next(i for i, line in enumerate(lines) if line.startswith("set "))
    return "\n".join(
        [
            lines[0],
            *_header(job),
            *lines[first_command:start],
            *(_assignment(name, value) for name, value in job.settings.items()),
            *lines[end + 1 :],
            "",
        ]
    )


def _header(job: Job) -> list[str]:
    one_task_per_rank = job.launcher == "srun"
    tasks = job.ranks_per_node if one_task_per_rank else 1
    options: dict[str, str | int | None] = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "exclude": job.exclude,
        "constraint": job.constraint,
        "array": job.array,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": max(1, job.cpus_per_node // tasks),
        "time": job.time,
        "signal": f"B:USR1@{job.signal_seconds}",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={_plain(name, v)}" for name, v in options.items() if v is not None]
    if not _PATH.fullmatch(job.output):
        raise SubmitError(
            f"the log path {job.output!r} holds a quote, a backslash, a # or a line break, which "
            "Slurm cannot take: give another --log-dir"
        )
    return [*lines, f'#SBATCH --output="{job.output}"', "#SBATCH --requeue"]


def _plain(option: str, value: str | int) -> str | int:
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        raise SubmitError(
            f"--{option} is {value!r}: only letters, digits and _ . , : @ % = + / [ ] - can stand "
            "in an #SBATCH line"
        )
    return value


def _assignment(name: str, value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return f"{name}={shlex.quote(value)}"
    return f"{name}=({' '.join(shlex.quote(word) for word in value)})"
