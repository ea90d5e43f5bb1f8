"""Where a run's numbers go: JSONL, TensorBoard, Weights & Biases, the terminal. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.monitor.alerts import Alert, Alerts
from megatron_rl.monitor.console import Console
from megatron_rl.monitor.redaction import redact
from megatron_rl.monitor.run_folder import read_rows, reopen_rows, to_line
from megatron_rl.monitor.tensorboard import TensorBoardWriter, samples_text
from megatron_rl.monitor.wandb_mirror import WandbMirror
from megatron_rl.runtime import log


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """Everything that one step writes.

    Attributes:
        histograms: tag → values of all replicas.
        ratio_counts: see `algorithms.histograms.ratio_counts`; None without an actor update.
        samples: prompts, responses and rewards.
    """

    step: int
    metrics: dict[str, float]
    histograms: dict[str, Tensor] = field(default_factory=dict)
    ratio_counts: Tensor | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)


class Writers:
    """Writes each step everywhere that the configuration names, and watches for diseases.

    Args:
        first_step: steps already done (a resumed run); later points of the files are dropped.
    """

    def __init__(self, config: Config, *, total_steps: int, first_step: int) -> None:
        self.folder = folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        monitor, settings = config.monitor, redact(_flat(config.to_dict()))
        self._metrics = reopen_rows(folder / "metrics.jsonl", first_step)
        self._samples = reopen_rows(folder / "samples.jsonl", first_step)
        self._alerts = reopen_rows(folder / "alerts.jsonl", first_step)
        self.alerts = Alerts(monitor.alerts)
        self._evaluated: set[int] = set()
        for row in read_rows(folder / "metrics.jsonl"):
            if "perf/step_seconds" in row:  # a step, not an evaluation
                self.alerts.add(_numbers(row))
            else:
                self._evaluated.add(row["step"])
        self.tensorboard = self.wandb = self.console = None
        if monitor.tensorboard:
            self.tensorboard = TensorBoardWriter(
                folder / "tensorboard", first_step=first_step, hparams=settings
            )
        if monitor.wandb:
            self.wandb = WandbMirror(folder, settings, first_step=first_step)
        if monitor.console:
            self.console = Console(total_steps, first_step)

    def phase(self, name: str) -> None:
        if self.console is not None:
            self.console.phase(name)

    def step(self, record: StepRecord) -> None:
        """A finished training step."""
        step, board = record.step, self.tensorboard
        for row in record.samples:
            _append(self._samples, {"step": step, **row})
        if board is not None:
            for tag, values in record.histograms.items():
                board.histogram(step, tag, values)
            if record.ratio_counts is not None:
                board.ratio_histogram(step, "distribution/ratio", record.ratio_counts)
            if record.samples:
                board.text(step, "samples", samples_text(record.samples))
        self._scalars(step, record.metrics)
        if self.console is not None:
            self.console.step(step, record.metrics)
        for alert in self.alerts.add(record.metrics):
            self._alert(step, alert)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation after `step` steps.

        One that a resumed run repeats, because it was made after the checkpoint, is not written
        again.
        """
        if step not in self._evaluated:
            self._evaluated.add(step)
            self._scalars(step, metrics)
        self.note(
            f"evaluation at step {step} · mean reward {metrics['eval/reward_mean']:.3f} on "
            f"{metrics['eval/prompts']:.0f} held-out prompts"
        )

    def note(self, text: str) -> None:
        """A sentence for the person at the terminal."""
        if self.console is not None:
            self.console.note(text)

    def close(self, *, failed: bool) -> None:
        """Closes all files; `failed` is what Weights & Biases shows."""
        for part in (self.tensorboard, self.console):
            if part is not None:
                part.close()
        if self.wandb is not None:
            self.wandb.close(failed=failed)
        for file in (self._metrics, self._samples, self._alerts):
            file.close()

    def _scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._metrics, {"step": step, **metrics})
        for mirror in (self.tensorboard, self.wandb):
            if mirror is not None:
                mirror.scalars(step, metrics)

    def _alert(self, step: int, alert: Alert) -> None:
        text = alert.message or f"{alert.rule}: over"
        _append(self._alerts, {"step": step, "rule": alert.rule, "message": alert.message})
        if alert.message is not None:
            log.warning("step %d: %s", step, text)
        else:
            log.info("step %d: %s", step, text)
        if self.tensorboard is not None:
            self.tensorboard.text(step, "alerts", f"**{alert.rule}** {text}")


def _append(file: Any, row: Mapping[str, Any]) -> None:
    file.write(to_line(row))
    file.flush()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {tag: value for tag, value in row.items() if "/" in tag}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
