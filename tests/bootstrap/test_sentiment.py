"""launch/sentiment.sh: its commands, and that they use one cache."""

import re

from tests.bootstrap.checkout_copy import commands


def test_dry_run_prints_the_commands(checkout):
    result = checkout.run("launch/sentiment.sh", "--dry-run", "--steps", "3")
    assert result.returncode == 0, result.stderr
    shown = [re.sub(r"^\S*env OMP\S* ", "", line) for line in commands(result.stdout)]
    assert [line.split()[2] for line in shown[2:5]] == [
        "launch.fetch_smollm2", "launch.fetch_movies", "megatron_rl.rewards.fit"
    ]  # fmt: skip
    assert "--to .cache/movies/reward" in shown[4]
    assert shown[5].endswith("--config configs/sentiment_ppo.yaml training.steps=3")
    assert checkout.calls() == []


def test_a_fitted_reward_model_is_kept(checkout):
    (checkout.folder / ".cache" / "movies" / "reward").mkdir(parents=True)
    result = checkout.run("launch/sentiment.sh", "--dry-run")
    assert "rewards.fit" not in result.stdout and "sentiment_ppo.yaml" in result.stdout


def test_other_cache_is_used_for_models_and_data(checkout):
    result = checkout.run("launch/sentiment.sh", "--dry-run", MEGATRON_RL_CACHE="/else where")
    *_, fit, train = commands(result.stdout)
    assert "--to /else\\ where/movies/reward" in fit
    for setting in (
        "model.actor.path=/else\\ where/smollm2-135m-instruct",
        "model.reward.path=/else\\ where/movies/reward",
        "data.train=/else\\ where/movies/prompts_train.jsonl",
        "data.eval=/else\\ where/movies/prompts_heldout.jsonl",
    ):
        assert f" {setting}" in train


def test_help_is_the_head_of_the_script(checkout):
    result = checkout.run("launch/sentiment.sh", "--help")
    assert result.returncode == 0 and "learned reward" in result.stdout
    assert "set -euo" not in result.stdout
