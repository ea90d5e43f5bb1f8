"""Building the wheel, apart from the checkout, since a build leaves files beside the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.bootstrap.checkout_copy import ROOT

SOURCES = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "train_ppo.py"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-index", "--no-build-isolation"]


def copy_sources(folder: Path) -> Path:
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in ("megatron_rl", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def build_wheel(source: Path, target: Path) -> Path:
    """Build the wheel of `source` into the empty folder `target` and return its file."""
    command = [*PIP, "wheel", "--quiet", "--no-deps", *OFFLINE, "--wheel-dir", target, source]
    subprocess.run(command, check=True)
    (file,) = target.glob("megatron_rl-*.whl")
    return file
