"""Layer: two GPUs. A reward model on a GPU of its own, over NCCL."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny_models import write_tiny_reward_model
from tests.trainer import run_case

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


def rows(actor: str, reward: dict, folder: Path, ranks: int, device: str) -> list[dict]:
    """Each step's metrics of a run of `train_ppo.py`."""
    values = run_case.settings(
        actor, folder, model__reward=reward, reward={}, training__steps=2, runtime__device=device
    )
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
        "train_ppo.py", "--config", str(config),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (Path(values["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_reward_model_on_a_gpu_of_its_own(tiny_model, tmp_path, device="cuda"):
    actor = str(tiny_model("llama"))
    reward = {"path": str(write_tiny_reward_model(tiny_model("mistral"), tmp_path / "reward"))}
    want = rows(actor, reward, tmp_path / "together", 1, device)
    got = rows(actor, reward | {"ranks": [1]}, tmp_path / "apart", 2, device)
    assert len(got) == len(want) == 2
    for name in ("reward/mean", "reward/std", "policy/loss", "value/loss"):
        assert math.isfinite(want[0][name])
        assert got[0][name] == pytest.approx(want[0][name], rel=1e-2, abs=1e-3), name
