"""A small valid configuration that tests change in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config import Config

MINIMAL = """\
model: {actor: {path: model_folder}}
data: {train: train.jsonl}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """The file with only what is required."""
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def load(minimal: Path) -> Callable[..., Config]:
    """``load(*overrides)`` on the minimal file."""
    return lambda *overrides: Config.load(minimal, overrides)
