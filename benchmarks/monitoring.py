"""What monitoring costs: writing a step, measuring a phase, making the report.

python benchmarks/monitoring.py
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.config import Config
from megatron_rl.monitor.phases import PhaseTimer
from megatron_rl.monitor.report import write_report
from megatron_rl.monitor.writers import StepRecord, Writers

STEPS = 500
DOCS = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def record(step: int, tags: list[str]) -> StepRecord:
    """A step with every documented tag, 1,024 samples and four of them as text."""
    sample = {"prompt": "p" * 200, "response": "r" * 2000, "reward": 1.0}
    return StepRecord(
        step=step, metrics=dict.fromkeys(tags, 1.0 / step) | {"perf/step_seconds": 1.0},
        ratio_counts=torch.rand(66, dtype=torch.float64), samples=[sample] * 4,
        histograms={f"distribution/{x}": torch.randn(1024) for x in ("reward", "length")},
    )  # fmt: skip


def seconds_of(actions: list) -> list[float]:
    """Wall-clock seconds of each action, sorted."""
    found = []
    for action in actions:
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return sorted(found)


def main() -> None:
    tags = sorted(set(re.findall(r"`([a-z]+/[a-z0-9_]+)`", DOCS.read_text())))
    tags = [tag for tag in tags if not tag.startswith("distribution/")]
    with tempfile.TemporaryDirectory() as folder:
        config = Config.from_dict(
            {
                "run_dir": folder, "model": {"actor": {"path": "none"}}, "data": {"train": "none"},
                "monitor": {"console": False, "alerts": {"enable": False}},
            }
        )  # fmt: skip
        writers = Writers(config, total_steps=STEPS, first_step=0)
        records = [record(step, tags) for step in range(1, STEPS + 1)]
        steps = seconds_of([lambda r=r: writers.step(r) for r in records])
        writers.close(failed=False)
        report = seconds_of([lambda: write_report(Path(folder))])[0]
        size = (Path(folder) / "report.html").stat().st_size
    timer = PhaseTimer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def empty_phase() -> None:
        with timer.phase("scoring"):
            pass

    phases = seconds_of([empty_phase] * 1000)
    print(f"{len(tags)} tags, {STEPS} steps on {timer.device}")
    for name, values in (("write a step", steps), ("an empty phase", phases)):
        p95 = values[int(0.95 * len(values))]
        print(f"{name}: median {statistics.median(values) * 1e3:.3f} ms, p95 {p95 * 1e3:.3f} ms")
    print(f"report of {STEPS} steps: {report:.2f} s, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
