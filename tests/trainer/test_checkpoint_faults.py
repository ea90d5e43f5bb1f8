"""Layer: processes under torchrun. A run's checkpoints when the world goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.checkpoint import faults
from tests.trainer import run_case
from tests.trainer.resume_run import OF_THE_MACHINE
from tests.trainer.test_failures import launch, reward_file


def short(model: Path, folder: Path, **changes) -> dict:
    """Four cheap steps, a save after every second one."""
    folder.mkdir(exist_ok=True)
    return run_case.settings(
        str(model), folder, **{
            "training__steps": 4, "training__epochs": 1, "rollout__max_new_tokens": 3,
            "training__micro_batch_size": 8, "checkpoint__save_interval": 2,
            "monitor__tensorboard": False, **changes,
        },
    )  # fmt: skip


def finish(folder: Path, values: dict, ranks: int) -> tuple[int, str]:
    process = launch(folder, values, ranks)
    _, error = process.communicate(timeout=240)
    return process.returncode, error


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the machine."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(OF_THE_MACHINE)}
        for line in lines
    ]


def wait_for_rows(folder: Path, process: subprocess.Popen, count: int) -> None:
    deadline = time.monotonic() + 200
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") >= count):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(ranks, tiny_model_dir, tmp_path_factory) -> list[dict]:
    """What the run logs when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks(2, run_case.train, short(tiny_model_dir, folder, parallel__tp=2))
    return rows(folder)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("point, in_background", [("before_fsync", False), ("after_shard", True)])
def test_sigterm_during_a_save(
    ranks, tiny_model_dir, tmp_path, monkeypatch, undisturbed, point, in_background
):
    """One rank gets SIGTERM while the first checkpoint is written: nothing of it is lost."""
    changes = dict(parallel__tp=2, checkpoint__async_save=in_background)
    values = short(tiny_model_dir, tmp_path, **changes)
    monkeypatch.setenv(faults.VARIABLE, f"{point}:1@1:SIGTERM")
    code, error = finish(tmp_path, values, 2)
    assert code != 0, error
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = int((checkpoints / "latest").read_text().removeprefix("step_"))
    assert newest in (2, 3) and (checkpoints / f"step_{newest:08d}" / "manifest.json").is_file()
    assert not list(checkpoints.glob(".step_*"))
    ranks(2, run_case.train, values)
    assert rows(tmp_path) == undisturbed


@pytest.mark.ranks
@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(tiny_model_dir, tmp_path):
    values = short(tiny_model_dir, tmp_path, training__steps=500)
    first = launch(tmp_path, values, 1)
    wait_for_rows(tmp_path, first, 1)
    code, error = finish(tmp_path, values, 1)
    assert code == 2 and "which another run uses (process" in error, error
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    _, error = first.communicate(timeout=120)
    assert first.returncode == 75, error
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps == list(range(1, len(steps) + 1)), "the second run touched nothing"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_the_earlier_checkpoint(
    ranks, tiny_model_dir, tmp_path, small_disk
):
    """It fills up while the run is going: at the start there was room."""
    ballast = small_disk / "ballast"
    fill = (
        f"import shutil; calls == 1 and open({str(ballast)!r}, 'wb').write("
        f"bytes(shutil.disk_usage({str(small_disk)!r}).free - 100_000))"
    )
    values = short(
        tiny_model_dir, tmp_path, checkpoint__dir=str(small_disk / "checkpoints"),
        algorithm__name="grpo", algorithm__kl={"placement": "none"},
        reward={"function": reward_file(tmp_path, "pass")},
    )  # fmt: skip
    values["training"]["steps"] = 2
    ranks(1, run_case.train, values)
    values["training"]["steps"] = 4
    reward_file(tmp_path, fill)
    code, error = finish(tmp_path, values, 1)
    assert code == 2 and "MiB free" in error and "earlier checkpoints are untouched" in error, error
    names = sorted(p.name for p in (small_disk / "checkpoints").iterdir() if p.name[0] != ".")
    assert names == ["latest", "step_00000002"]
    ballast.unlink()
    reward_file(tmp_path, "pass")
    ranks(1, run_case.train, values)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_read_only_folder_is_refused_at_the_start(tiny_model_dir, tmp_path, small_disk):
    values = short(tiny_model_dir, tmp_path, checkpoint__dir=str(small_disk / "checkpoints"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, error = finish(tmp_path, values, 1)
    assert code == 2 and "checkpoint.dir" in error and "Read-only file system" in error, error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
