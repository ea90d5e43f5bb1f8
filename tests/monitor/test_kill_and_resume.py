"""Layer: processes. A run killed without warning and started again has curves without a seam."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

from megatron_rl.monitor.run_folder import read_attempts
from tests.trainer import run_case
from tests.trainer.test_failures import launch


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_run_continues_its_curves(tiny_model_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__steps=400, checkpoint__save_interval=3,
        evaluation={"interval": 2, "prompts": 4},
    )  # fmt: skip
    process = launch(tmp_path, values, 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and '"step": 5,' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    shutil.copytree(tmp_path / "run" / "tensorboard", tmp_path / "before")
    values["training"]["steps"] = 9
    second = launch(tmp_path, values, 1)
    _, error = second.communicate(timeout=240)
    assert second.returncode == 0, error

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [(r["step"], r["policy/loss"]) for r in rows if "policy/loss" in r]
    assert [step for step, _ in losses] == list(range(1, 10))
    undone = [(r["step"], r["policy/loss"]) for r in before if "policy/loss" in r]
    assert losses[: len(undone)] == undone[:9], "an exact resume repeats what was lost"
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for tag in ("policy/loss", "perf/step_seconds", "eval/reward_mean"):
        expected = [(r["step"], pytest.approx(r[tag], rel=1e-6)) for r in rows if tag in r]
        assert [(e.step, e.value) for e in events.Scalars(tag)] == expected
    old = EventAccumulator(str(tmp_path / "before"))
    old.Reload()
    kept = [e.step for e in old.Scalars("policy/loss")]
    assert kept == [step for step, _ in undone][: len(kept)] and len(kept) >= 4
    attempts = read_attempts(tmp_path / "run")
    assert [a["first_step"] for a in attempts] == [0, 3]
    assert (tmp_path / "run" / "report.html").is_file()
