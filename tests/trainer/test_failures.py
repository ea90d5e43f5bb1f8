"""Layer: processes under torchrun. A failure on one rank ends all; a signal saves and says so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.trainer import run_case

ROOT = Path(__file__).resolve().parents[2]
REWARD = '''
calls = 0
def score(prompts, responses, records):
    global calls
    calls += 1
    {body}
    return [float(len(r)) for r in responses]
'''


def launch(folder: Path, values: dict, ranks: int) -> subprocess.Popen:
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        env.pop(name, None)
    return subprocess.Popen(
        [*command, str(ROOT / "train_ppo.py"), "--config", str(config)], cwd=folder, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def reward_file(folder: Path, body: str) -> str:
    path = folder / "my_reward.py"
    path.write_text(REWARD.format(body=body))
    return f"{path}:score"


@pytest.mark.slow
@pytest.mark.ranks
def test_reward_that_raises_in_step_3_stops_all_ranks(tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, parallel__tp=2, checkpoint__save_interval=1,
        training__steps=6, training__epochs=1,
        reward={"function": reward_file(tmp_path, "if calls == 3: raise RuntimeError('boom')")},
    )  # fmt: skip
    process = launch(tmp_path, values, 2)
    _, error = process.communicate(timeout=240)
    assert process.returncode not in (0, 2, 75)
    assert error.count("rank 0 failed:\n") == 1 and "RuntimeError: boom" in error
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert "2" in latest, latest
    logs = tmp_path / "run" / "logs"
    log = (logs / "rank_00000.log").read_text()
    assert log.count("RuntimeError: boom") == 1 and "in score" in log, "once, with its traceback"
    assert "rank 0 ended with RuntimeError: boom" in (logs / "rank_00001.log").read_text()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "body, message",
    [("return [1.0]", "1 scores for"), ("return [float('nan')] * len(responses)", "finite")],
)
def test_wrong_scores_are_named(tiny_model_dir, tmp_path, ranks, body, message):
    from tests.rank_pool import RankError

    values = run_case.settings(
        str(tiny_model_dir), tmp_path, reward={"function": reward_file(tmp_path, body)}
    )
    with pytest.raises(RankError, match=message):
        ranks(1, run_case.run, values, 1)
    log = (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    assert re.search(message, log), "close() comes after the failure is in the log"


@pytest.mark.ranks
@pytest.mark.slow
def test_signal_saves_and_resume_continues(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(str(tiny_model_dir), tmp_path, training__steps=500)
    process = launch(tmp_path, values, 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    done = [json.loads(row)["step"] for row in metrics.read_text().splitlines()]
    values["training"]["steps"] = done[-1] + 2
    ranks(1, run_case.train, values)
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines()]
    assert steps == list(range(1, done[-1] + 3))
