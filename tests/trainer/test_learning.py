"""Layer: gloo ranks. Every algorithm solves a small task from a fixed seed: answer in lower case.

`pytest tests/trainer/test_learning.py -m slow -s` prints the curves; docs/learning.svg shows them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import run_case

ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_plus_plus")
STEPS = 24


def settings(model: str, folder: Path, name: str) -> dict:
    """The reward is the share of small letters: about a quarter for the random model."""
    return run_case.settings(
        model, folder, rollout__batch_size=12, rollout__n=4, training__mini_batch_size=None,
        training__micro_batch_size=24, training__epochs=1, training__steps=STEPS,
        training__actor={"lr": 4e-3}, model__reference={"enable": False}, algorithm__name=name,
        algorithm__kl={"placement": "none"},
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_solves_a_small_task(ranks, tiny_model_dir, tmp_path, name):
    values = settings(str(tiny_model_dir), tmp_path, name)
    rewards = [m["reward/mean"] for m in ranks(2, run_case.run, values, STEPS)[0]]
    print(name, [round(r, 2) for r in rewards])
    assert sum(rewards[:2]) / 2 < 0.6, "the task must not be solved at the start"
    assert sum(rewards[-4:]) / 4 > 0.9, rewards
