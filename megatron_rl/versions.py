"""The package's version, what it needs, and a check that says so in one sentence.

setup.py reads this file by path, so it imports nothing outside the standard library at the top.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

VERSION = "0.1.0"
MINIMUM_PYTHON = (3, 11)
# Lower bounds only: an environment that already has a newer torch keeps it. The exact versions that
# the tests run with are in constraints.txt.
REQUIREMENTS = {
    "torch": "2.6",
    "megatron-core": "0.16",
    "transformers": "4.57",
    "tokenizers": "0.22",
    "safetensors": "0.5",
    "huggingface-hub": "0.34",
    "sentencepiece": "0.2",
    "pyyaml": "6.0",
    "tensorboard": "2.15",
    "psutil": "5.9",
    "rich": "13.7",
    "plotly": "5.20",
    "numpy": "1.26",
}


class UnsupportedVersionError(ValueError):
    """Python or a package is missing or too old; the message is one sentence with the way out."""


def exit_if_unsupported() -> None:
    """End the process with one sentence and exit code 2 if `check_versions` finds something.

    A program calls it before its other imports, which fail in worse words.
    """
    try:
        check_versions()
    except UnsupportedVersionError as error:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def installed_apex() -> str | None:
    """Which package `import apex` would give: "nvidia", "other", or None for none.

    PyPI's package of that name is a web toolkit; NVIDIA's has sub-packages that it lacks.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:
        return None
    parts = ("multi_tensor_apply", "normalization")
    found = any((Path(spec.origin).parent / name).is_dir() for name in parts)
    return "nvidia" if found else "other"


def check_versions() -> None:
    """Raise `UnsupportedVersionError` for the first requirement that this environment breaks.

    Reads package metadata only (no import of torch), so an entry point can call it first.
    """
    if sys.version_info < MINIMUM_PYTHON:
        needed, found = (".".join(map(str, v[:2])) for v in (MINIMUM_PYTHON, sys.version_info))
        raise UnsupportedVersionError(
            f"megatron-rl needs Python {needed} or newer, but {sys.executable} is Python {found}; "
            f"make a virtual environment with Python {needed}."
        )
    try:
        from packaging.version import Version
    except ImportError:
        raise UnsupportedVersionError(
            "megatron-rl needs packaging, but it is not installed; pip install packaging."
        ) from None
    for name, minimum in REQUIREMENTS.items():
        install = f"pip install '{name}>={minimum}'"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise UnsupportedVersionError(
                f"megatron-rl needs {name} {minimum} or newer, but it is not installed; {install}."
            ) from None
        if Version(found) < Version(minimum):
            raise UnsupportedVersionError(
                f"megatron-rl needs {name} {minimum} or newer, but {found} is installed; {install}."
            )
    if installed_apex() == "other":
        raise UnsupportedVersionError(
            "the installed package `apex` is not NVIDIA's Apex but PyPI's web toolkit of that "
            "name; pip uninstall apex (NVIDIA's is optional, and built from its own sources)."
        )
