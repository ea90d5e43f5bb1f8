"""Pure: rules between settings of features that are still refused hold once they are let in."""

from __future__ import annotations

import pytest

from megatron_rl.config import ConfigError, not_yet

CASES = [
    (
        ("training.grad_reduce=manual", "training.gradient_compression.enable=true"),
        ("gradient_compression.enable = true", "manual", "distributed_optimizer"),
    ),
    (
        ("algorithm.name=rloo", "rollout.n=2", "hybrid_engine.share_embeddings=joint"),
        ("share_embeddings = 'joint'", "no critic", "remove it"),
    ),
    (
        ("model.critic.parallel={tp: 2, vpp: 2}",),
        ("model.critic.parallel.vpp = 2", "pp is 1", "vpp=1"),
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), CASES, ids=lambda case: case[-1])
def test_rule_of_a_feature_to_come(load, monkeypatch, overrides, parts) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", {})
    with pytest.raises(ConfigError) as refusal:
        load(*overrides)
    for part in parts:
        assert part in str(refusal.value), str(refusal.value)


def test_full_kl_needs_both_vocabularies_cut_alike(load, monkeypatch) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", {})
    kl = "algorithm.kl={estimator: full, placement: loss, coef: 0.1}"
    load(kl, "parallel.tp=2", "model.reference.parallel={tp: 2}")
    with pytest.raises(ConfigError, match="cut alike.*remove model.reference.parallel"):
        load(kl, "parallel.tp=2", "model.reference.parallel={tp: 1}")


def test_a_model_of_its_own_layout_is_checked_against_the_world(load, monkeypatch) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", {})
    config = load("parallel.tp=2", "model.critic.parallel={pp: 4}")
    assert config.role_parallel("critic").pp == 4
    assert config.role_parallel("actor").tp == 2
    assert config.validate_world(8) == 4
    with pytest.raises(ConfigError, match=r"model\.critic\.parallel\.tp = 1: .* divide the 6"):
        config.validate_world(6)
