"""Where metrics go: TensorBoard, one JSONL, the terminal. Rank 0 only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config import Config


class Writers:
    """Writes each step's numbers everywhere that the configuration names.

    Args:
        first_step: steps already done (a resumed run); later points of the files are dropped.
    """

    def __init__(self, config: Config, *, total_steps: int, first_step: int) -> None:
        self.folder = Path(config.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        use_tensorboard = config.monitor.tensorboard
        self.tensorboard = _tensorboard(self.folder, first_step) if use_tensorboard else None
        self.metrics_file = _continued(self.folder / "metrics.jsonl", first_step)
        self.samples_file = _continued(self.folder / "samples.jsonl", first_step)
        self.console = Console(total_steps, first_step) if config.monitor.console else None
        (self.folder / "config.yaml").write_text(config.to_yaml())

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._line(self.metrics_file, {"step": step, **metrics})
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.console is not None:
            self.console.step(step, metrics)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._line(self.samples_file, {"step": step, **row})
        if self.tensorboard is not None and rows:
            text = "\n\n".join(
                f"reward {row['reward']:.3f}\n```\n{row['prompt']}⏵{row['response']}\n```"
                for row in rows
            )
            self.tensorboard.add_text("samples", text, step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._line(self.metrics_file, {"step": step, **metrics})
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        self.note(
            f"evaluation at step {step} · mean reward {metrics['eval/reward_mean']:.3f} on "
            f"{metrics['eval/prompts']:.0f} held-out prompts"
        )

    def note(self, text: str) -> None:
        """A sentence for the person at the terminal."""
        if self.console is not None:
            self.console.note(text)

    def _line(self, file: Any, row: dict[str, Any]) -> None:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.console is not None:
            self.console.close()
        self.metrics_file.close()
        self.samples_file.close()


def _tensorboard(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge = first_step + 1 if first_step else None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge)


def _continued(path: Path, first_step: int) -> Any:
    """Opens a JSONL for appending, without the rows after `first_step` of an undone run."""
    rows = path.read_text().splitlines() if path.is_file() and first_step else []
    kept = [row for row in rows if json.loads(row)["step"] <= first_step]
    file = path.open("w")
    file.writelines(row + "\n" for row in kept)
    return file


class Console:
    """One line per step, and in a terminal a progress bar with the estimated end."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.rich = RichConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=self.rich, disable=not sys.stdout.isatty(),
        )  # fmt: skip
        self.task = self.progress.add_task("steps", total=total_steps, completed=first_step)
        self.total = total_steps
        self.progress.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        shown = (
            ("reward", "reward/mean", ".3f"), ("kl", "kl/ref", ".4f"),
            ("entropy", "policy/entropy", ".3f"), ("clip", "policy/clipfrac", ".3f"),
            ("value loss", "value/loss", ".4f"), ("length", "length/response_mean", ".1f"),
            ("s", "perf/step_seconds", ".1f"), ("tok/s", "perf/tokens_per_second", ".0f"),
        )  # fmt: skip
        parts = [f"{name} {metrics[key]:{form}}" for name, key, form in shown if key in metrics]
        eta = metrics.get("perf/eta_seconds")
        left = f" · {eta / 60:.1f} min left" if eta is not None else ""
        self.rich.print(
            f"step {step}/{self.total} · " + " · ".join(parts) + left,
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        self.progress.update(self.task, completed=step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._line(self.metrics_file, {"step": step, **metrics})
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        self.note(
            f"evaluation at step {step} · mean reward {metrics['eval/reward_mean']:.3f} on "
            f"{metrics['eval/prompts']:.0f} held-out prompts"
        )

    def note(self, text: str) -> None:
        self.rich.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
