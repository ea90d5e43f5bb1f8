"""A copy of the launch scripts where every program that they start is a logging stand-in."""

import shutil
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "bash cat cp dirname env find grep id mkdir mktemp nproc realpath rm sed sha256sum tail tee "
    "timeout tr"
)

# Logs its arguments; `-m venv DIR` makes DIR with a copy of itself, as the real one does.
PYTHON = """#!/bin/bash
printf '%s\\n' "python $*" >>"$LOG"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) exit "${PIP_STATUS:-0}" ;;
    "-m pytest --collect-only"*) exit "${COLLECT_STATUS:-5}" ;;
    "-m pytest "*)
        echo "===== 3 passed in 1.00s ====="
        exit "${PYTEST_STATUS:-0}"
        ;;
esac
"""


class Checkout:
    """A copy of the scripts in `folder`, run with nothing on PATH but basic tools and stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "check out"  # a space, which unquoted paths would not survive
        self.programs = folder / "bin"
        self.log = folder / "log"
        self.programs.mkdir()
        self.folder.mkdir()
        for name in ("launch", ".ci"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        for name in ("constraints.txt", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        (self.folder / "megatron_rl").mkdir()
        shutil.copy(ROOT / "megatron_rl" / "versions.py", self.folder / "megatron_rl")
        for tool in TOOLS.split():
            (self.programs / tool).symlink_to(shutil.which(tool))
        self.program("python3.11", PYTHON)

    def program(self, name: str, text: str) -> None:
        self.executable(self.programs / name, text)

    @staticmethod
    def executable(file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run(self, script: str, *arguments: str, **environment: str):
        variables = {"PATH": str(self.programs), "LOG": str(self.log), "HOME": "/nonexistent"}
        return subprocess.run(
            ["bash", str(self.folder / script), *arguments],
            env=variables | environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What was started since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("python -c")]


def commands(output: str) -> list[str]:
    return [line[2:] for line in output.splitlines() if line.startswith("+ ")]
