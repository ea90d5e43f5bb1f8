"""What a run folder says about the run: settings, command, versions, git state, environment.

`run.json` has one entry per attempt: a run that was stopped and started again shows each start.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.monitor.redaction import redact, redact_command, redact_text
from megatron_rl.versions import REQUIREMENTS, VERSION

OPTIONAL_PACKAGES = ("triton", "transformer-engine", "flash-attn", "nvidia-ml-py", "wandb", "vllm")
SOURCE = Path(__file__).resolve().parents[2]


def describe_run(config: Config, folder: Path, *, first_step: int, ranks: dict[str, Any]) -> None:
    """Writes `config.yaml`, appends this attempt to `run.json`, and the uncommitted changes of the
    source to `source.diff`.

    Args:
        first_step: steps done before this attempt.
        ranks: where the ranks are, see `Monitor`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    git, diff = git_state(SOURCE)
    attempt = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "first_step": first_step,
        "command": redact_command([sys.executable, *sys.argv]), "directory": os.getcwd(),
        "versions": versions(), "git": git, "ranks": ranks,
        "environment": redact(dict(sorted(os.environ.items()))),
    }  # fmt: skip
    attempts = read_attempts(folder) if first_step else []
    write_whole(
        folder / "run.json",
        json.dumps({"attempts": [*attempts, attempt]}, indent=1, ensure_ascii=False),
    )
    if diff:
        write_whole(folder / "source.diff", redact_text(diff))
    else:
        (folder / "source.diff").unlink(missing_ok=True)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The attempts in `run.json`; none if there is no such file or it is damaged."""
    try:
        return json.loads((folder / "run.json").read_text())["attempts"]
    except (OSError, ValueError, KeyError):
        return []


def versions() -> dict[str, str]:
    """Versions of everything that a result may depend on."""
    found = {
        "megatron-rl": VERSION, "python": platform.python_version(), "system": platform.platform()
    }  # fmt: skip
    for name in (*REQUIREMENTS, *OPTIONAL_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def git_state(source: Path) -> tuple[dict[str, Any], str]:
    """Commit, branch and changed files of a checkout, and the difference to the commit.

    Returns:
        an empty dictionary and no text where `source` is no git checkout or git is missing.
    """
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None or not (source / ".git").exists():
        return {}, ""
    status = _git(source, "status", "--porcelain") or ""
    branch = _git(source, "branch", "--show-current") or ""
    changed = [line[3:] for line in status.splitlines()]
    state = {"commit": commit.strip(), "branch": branch.strip(), "changed": changed}
    return state, _git(source, "diff", "HEAD") or ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def this_place(device: torch.device) -> dict[str, str]:
    """Host and device of this rank."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {"host": socket.gethostname(), "device": name or platform.machine()}


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step: whoever reads it sees the old or the new text."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file. A last line that a killed run left half-written is left out."""
    rows: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1} is not JSON") from None
    return rows


def reopen_rows(path: Path, first_step: int) -> Any:
    """Opens a JSONL file for appending, without the rows after `first_step` of an undone run."""
    rows = read_rows(path) if first_step else []
    kept = [row for row in rows if row["step"] <= first_step]
    write_whole(path, "".join(to_line(row) for row in kept))
    return path.open("a", encoding="utf-8")


def to_line(row: dict[str, Any]) -> str:
    """A row of a JSONL file; line separators of Unicode stay inside it."""
    text = json.dumps(row, ensure_ascii=False)
    for separator in ("\u2028", "\u2029", "\x85"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text + "\n"
