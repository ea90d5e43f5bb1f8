"""Layer: one gloo rank. A run from Python: the same trainer, a reward that is a plain function."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.trainer import run_case


def drive(rank, world, path, overrides):
    """The README's loop."""
    from megatron_rl import Config, Trainer

    def reward(prompts, responses, records):
        return [float(len(r)) for r in responses]

    trainer = Trainer(Config.load(path, overrides), reward=reward)
    rewards = [trainer.step()["reward/mean"] for _ in range(2)]
    held_out = trainer.evaluate()
    saved = trainer.save()
    trainer.close()
    trainer.close()
    resumed = Trainer(Config.load(path, overrides), reward=reward)
    step = resumed.step_count
    rewards.append(resumed.step()["reward/mean"])
    resumed.close()
    return rewards, held_out, str(saved), step


@pytest.mark.ranks
def test_run_from_python(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(str(tiny_model_dir), tmp_path)
    values.pop("reward")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    rewards, held_out, saved, step = ranks(1, drive, str(path), ["training.epochs=1"])[0]
    assert len(rewards) == 3 and all(r > 0 for r in rewards)
    assert held_out["eval/prompts"] == 8 and held_out["eval/reward_mean"] > 0
    assert Path(saved).is_dir() and step == 2


@pytest.mark.ranks
def test_own_estimator_and_loss_are_used(ranks, tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, algorithm__name="rloo", algorithm__kl={"placement": "none"},
        algorithm__advantage_function="tests.trainer.run_case:only_the_best",
        algorithm__policy_loss_function="tests.trainer.run_case:plain_policy_gradient",
    )  # fmt: skip
    metrics = ranks(2, run_case.run, values, 1)[0][0]
    assert metrics["advantage/mean"] <= 0
    assert metrics["policy/grad_norm"] > 0
