"""Pure: the generation layout, from the settings that describe it; contradictions are refused."""

from __future__ import annotations

import pytest

from megatron_rl.config import ConfigError

MICRO = "hybrid_engine={{mode: micro_dp, {}}}"
CASES = [
    ("parallel.tp=4", MICRO.format("generation_tp: 3"),
     ("generation_tp = 3", "divide parallel.tp=4", "[1, 2, 4]")),
    ("parallel.pp=2", MICRO.format("generation_pp: 4"),
     ("generation_pp = 4", "divide parallel.pp=2", "[1, 2]")),
    ("parallel={tp: 4, pp: 2}",
     MICRO.format("generation_tp: 2, generation_pp: 1, micro_dp_size: 2"),
     ("micro_dp_size = 2", "tp*pp = 8", "use 4")),
    ("parallel.tp=4", MICRO.format("micro_dp_size: 3"),
     ("micro_dp_size = 3", "tp*pp = 4", "[2, 4]")),
    ("parallel.tp=4", "hybrid_engine.mode=micro_dp",
     ("mode = 'micro_dp'", "tp=1 pp=1, tp=2 pp=1", "generation_tp")),
    ("parallel.tp=1", "hybrid_engine.mode=micro_dp", ("tp*parallel.pp is 1", "zero_rep")),
    ("parallel.tp=4", MICRO.format("generation_tp: 4"), ("is the training layout", "zero_rep")),
    ("parallel.tp=4", MICRO.format("micro_dp_size: 1"), ("is the training layout", "zero_rep")),
    ("parallel.tp=4", "hybrid_engine.keep_generation_weights=true",
     ("keep_generation_weights = true", "gathers no weights", "micro_dp")),
    ("parallel.tp=1", "hybrid_engine.actor_offload.enable=true",
     ("actor_offload.offload_device = null", "required", "offload_device=cpu")),
    ("parallel.tp=1", "hybrid_engine.reward_offload={enable: true, offload_device: cpu}",
     ("reward_offload.enable = true", "no reward model", "remove it")),
    ("parallel.tp=4", "model.critic.parallel={pp: 4}", "hybrid_engine.share_embeddings=read_only",
     ("share_embeddings = 'read_only'", "cut alike", "remove model.critic.parallel")),
    ("model.critic.path=another", "hybrid_engine.share_embeddings=read_only",
     ("share_embeddings = 'read_only'", "another model's", "remove model.critic.path")),
    ("hybrid_engine.actor_offload={enable: true, offload_device: cpu}",
     "hybrid_engine.share_embeddings=read_only", ("has it away", "remove")),
    ("algorithm.critic_warmup_steps=3", "hybrid_engine.share_embeddings=joint",
     ("share_embeddings = 'joint'", "both models must step together", "read_only")),
    ("training.dtype=fp16", "hybrid_engine.share_embeddings=joint",
     ("share_embeddings = 'joint'", "a factor of its own", "read_only")),
    ("parallel.tp=4", "model.critic.parallel={pp: 4}", "hybrid_engine.share_embeddings=joint",
     ("share_embeddings = 'joint'", "cut alike", "remove model.critic.parallel")),
    ("parallel.tp=1", "model.reward.parallel={pp: 2}",
     ("model.reward.parallel = ", "model.reward.path is null", "set model.reward.path or")),
    ("model.reference={enable: false, parallel: {pp: 2}}", "algorithm.kl.placement=none",
     ("model.reference.parallel = ", "model.reference.enable is false", "enable=true or")),
    ("model.reward={path: r, ranks: [0]}", "parallel.tp=1",
     ("model.reward.ranks = [0]", "rank 0 trains", "other ranks")),
    ("model.reward={path: r, ranks: []}", "parallel.tp=1", ("ranks = []", "at least one rank")),
    ("model.reward={path: r, ranks: [2, 2]}", "parallel.tp=1", ("ranks = [2, 2]", "none twice")),
    ("model.reward={path: r, ranks: [2, 3]}", "model.reference.ranks=[3]",
     ("model.reward.ranks = [2, 3]", "rank 3 holds the reference already", "other ranks")),
    ("model.reward.ranks=[3]", "parallel.tp=1",
     ("model.reward.ranks = [3]", "model.reward.path is null", "set model.reward.path")),
    ("model.reference={enable: false, ranks: [3]}", "algorithm.kl.placement=none",
     ("model.reference.ranks = [3]", "model.reference.enable is false", "enable=true")),
    ("model.reference.ranks=[3]",
     "hybrid_engine.reference_offload={enable: true, offload_device: cpu}",
     ("reference_offload.enable = true", "model.reference.ranks", "remove it")),
    ("model.reference.ranks=[3]",
     "algorithm.kl={estimator: full, placement: loss, coef: 0.1}",
     ("kl.estimator = 'full'", "do not travel", "k3")),
    ("model.reference.ranks=[3]",
     "training.gradient_compression={enable: true, hierarchical: true}",
     ("gradient_compression.hierarchical = true", "every node", "model.reference.ranks")),
    ("parallel.tp=4", "hybrid_engine.generation_pp=1", ("training layout", "mode=micro_dp")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[-1])[-60:])
def test_contradictions_are_refused_with_what_fits(load, case) -> None:
    *overrides, parts = case
    with pytest.raises(ConfigError) as refusal:
        load(*overrides)
    for part in parts:
        assert part in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ("generation_tp: 2, generation_pp: 1, micro_dp_size: 4", [(2, 1)]),
        ("generation_tp: 2", [(2, 2)]),
        ("generation_pp: 1", [(4, 1)]),
        ("micro_dp_size: 4", [(2, 1), (1, 2)]),
        ("micro_dp_size: 2, generation_tp: 2", [(2, 2)]),
    ],
)
def test_what_is_not_said_follows(load, settings, layouts) -> None:
    """A size left out stays as in training, or follows from micro_dp_size; fewest stages first."""
    engine = load("parallel={tp: 4, pp: 2}", MICRO.format(settings)).hybrid_engine
    assert engine.generation_layouts(4, 2) == layouts


def test_ranks_of_frozen_models_are_checked_against_the_world(load):
    overrides = ("parallel.tp=2", "model.reference={ranks: [4], parallel: {tp: 1}}")
    config = load(*overrides, "model.reward={path: r, ranks: [5, 2], parallel: {tp: 2}}")
    assert config.validate_world(7) == 2
    places = [config.place_of(rank, 7) for rank in range(7)]
    assert [(p.name, p.index, p.size) for p in places] == [
        ("training", 0, 4), ("training", 1, 4), ("reward", 0, 2), ("training", 2, 4),
        ("reference", 0, 1), ("reward", 1, 2), ("training", 3, 4),
    ]  # fmt: skip
    assert not places[0].alone and load().place_of(1, 2).alone
    places[0].check_trains(0)
    for call, message in (
        (lambda: config.validate_world(5), r"reward\.ranks = .*no rank 5 among the 5 .*from 1 to"),
        (lambda: config.validate_world(6), r"parallel\.tp = 2: .* divide the 3 ranks that train"),
        (lambda: load(*overrides, "model.reward={path: r, ranks: [5]}").validate_world(6),
         r"model\.reward\.parallel\.tp = 2: .* divide the 1 ranks in model\.reward\.ranks"),
        (lambda: places[4].check_trains(4), r"rank 4 holds the reference.*serve_frozen_model"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            call()
