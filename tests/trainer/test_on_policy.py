"""Layer: gloo ranks. Before any update, the policy that trains is the policy that drew."""

from __future__ import annotations

import pytest

from tests.tiny_models import write_tiny_model
from tests.trainer import run_case


@pytest.mark.ranks
@pytest.mark.parametrize("placement", ["reward", "none"])
def test_one_epoch_and_one_mini_batch_have_ratio_one_and_clip_nothing(
    ranks, tiny_model_dir, tmp_path, placement
):
    """Exactly, in fp32: with old log-probs from a pass of their own ("reward"), and without."""
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__epochs=1, training__mini_batch_size=None,
        algorithm__kl={"placement": placement, "coef": 0.05 * (placement == "reward")},
        parallel__tp=2,
    )  # fmt: skip
    for metrics in ranks(2, run_case.run, values, 2)[0]:
        assert metrics["policy/ratio"] == 1.0
        assert metrics["policy/clipfrac"] == 0.0
        assert metrics["policy/approx_kl"] == metrics["policy/approx_kl3"] == 0.0
        assert metrics["drift/max_abs"] < 1e-4


@pytest.mark.ranks
def test_logged_kl_is_measured_before_it_shapes_a_reward(ranks, tiny_model_dir, tmp_path):
    other = write_tiny_model("llama", tmp_path / "reference", seed=1)
    logged = []
    for coef in (0.01, 5.0):
        values = run_case.settings(
            str(tiny_model_dir), tmp_path, algorithm__kl={"placement": "reward", "coef": coef},
            model__reference={"path": str(other)},
        )  # fmt: skip
        logged.append(ranks(1, run_case.run, values, 1)[0][0])
    small, large = logged
    assert small["kl/ref"] == large["kl/ref"] != 0 and small["reward/mean"] == large["reward/mean"]
    assert small["value/return"] != large["value/return"], "the KL is part of the reward"


SAMPLING = {
    "greedy": dict(rollout__temperature=0.0),
    "cut": dict(rollout__temperature=0.7, rollout__top_k=20, rollout__top_p=0.8),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", SAMPLING)
def test_training_logprobs_are_of_the_distribution_that_was_sampled(
    ranks, tiny_model_dir, tmp_path, name
):
    """Greedy reports untempered log-probs; top-k and top-p renormalise in training, too."""
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, rollout__n=1, training__mini_batch_size=None,
        training__epochs=1, **SAMPLING[name],
    )  # fmt: skip
    (metrics,) = ranks(1, run_case.run, values, 1)[0]
    assert metrics["drift/max_abs"] < 1e-4 and metrics["policy/ratio"] == 1.0
    assert metrics["policy/entropy"] > 0.1, "not the distribution of greedy choices"


def draws(rank, world, values):
    """(prompt, response tokens) of each sample of this replica, and its tensor parallel rank."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        batch, _ = trainer.rollout.draw_step()
        rows = zip(batch.sequences, batch.prompt_lengths, strict=True)
        return [tuple(s[p:].tolist()) for s, p in rows], trainer.groups.dp_rank
    finally:
        trainer.close()


@pytest.mark.ranks
def test_replicas_draw_different_samples_of_one_prompt_and_their_ranks_the_same(
    ranks, tiny_model_dir, tmp_path
):
    values = run_case.settings(str(tiny_model_dir), tmp_path, parallel__tp=2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one plus two"}\n' * 8)
    results = ranks(4, draws, values)
    by_replica: dict[int, list] = {}
    for samples, replica in results:
        assert by_replica.setdefault(replica, samples) == samples, "ranks of a replica differ"
    everything = sum(by_replica.values(), [])
    assert len(everything) == 16 and len(set(everything)) > 12
