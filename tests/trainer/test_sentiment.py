"""Layer: gloo ranks, real model. The learned-reward example, cut to a minute."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch.fetch_movies import ensure_movies
from megatron_rl import Config
from megatron_rl.rewards import fit
from tests.trainer import run_case

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ranks
def test_sentiment_example(ranks, smollm2_path, tmp_path, capsys):
    """Fit on few sentences beats chance on held-out ones; four models train on two ranks."""
    movies = ensure_movies(smollm2_path.parent)
    code = fit.main([
        "--model", str(smollm2_path), "--to", str(tmp_path / "reward"), "--layers", "12",
        "--train", str(movies / "rated_train.jsonl"), "--examples", "160",
        "--heldout", str(movies / "rated_heldout.jsonl"), "--heldout-examples", "100",
    ])  # fmt: skip
    assert code == 0
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split(" %")[0])
    assert accuracy > 55, "few sentences and layers, yet better than a coin"
    config = Config.load(ROOT / "configs" / "sentiment_ppo.yaml", [
        f"model.actor.path={smollm2_path}", f"model.reward.path={tmp_path / 'reward'}",
        f"data.train={movies / 'prompts_train.jsonl'}",
        f"data.eval={movies / 'prompts_heldout.jsonl'}", f"run_dir={tmp_path / 'run'}",
        "rollout.batch_size=6", "rollout.max_new_tokens=4", "training.steps=2",
        "training.mini_batch_size=3",
        "monitor.console=false",
    ])  # fmt: skip
    for steps in ranks(2, run_case.run, config.to_dict(), 2):
        for metrics in steps:
            assert metrics["reward/model_mean"] == pytest.approx(metrics["reward/mean"])
            assert -4.5 < metrics["reward/mean"] < 4.5 and metrics["reward/std"] > 0.05
            assert all(math.isfinite(v) for v in metrics.values())
            assert metrics["policy/grad_norm"] > 0 and metrics["value/grad_norm"] > 0
        assert steps[0]["kl/ref"] == pytest.approx(0.0, abs=1e-4)
    samples = [json.loads(line) for line in open(tmp_path / "run" / "samples.jsonl")]
    assert {"prompt", "response", "reward"} <= samples[0].keys()
