"""The package's version, what it needs, and a check that says so in one sentence.

setup.py reads this file by path, so it imports nothing outside the standard library at the top.
"""

import importlib.metadata
import sys

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
    from packaging.version import Version

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
