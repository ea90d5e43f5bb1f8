"""Mirrors the metrics to Weights & Biases (`monitor.wandb`); imported only when that is on."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError


def check_installed() -> None:
    """Refuses `monitor.wandb` where the package is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "monitor.wandb = true: the package wandb is not installed; pip install wandb, or leave "
            "monitor.wandb at its default, false.",
            setting="monitor.wandb",
        )


class WandbMirror:
    """The same tags and steps as in TensorBoard, under the run's own id.

    The id is kept in the run folder, so that a resumed run goes on with its curves. Steps that an
    earlier attempt did after its last checkpoint are there already: wandb keeps the first value
    of a step.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, first_step: int) -> None:
        import wandb

        identity = folder / "wandb_run_id"
        if not (first_step and identity.is_file()):
            identity.write_text(uuid.uuid4().hex[:12])
        # Project, entity, mode and the rest come from WANDB_* variables, where they are set.
        self._run = wandb.init(
            name=folder.name, dir=str(folder), config=dict(settings),
            id=identity.read_text().strip(), resume="allow",
        )  # fmt: skip

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
