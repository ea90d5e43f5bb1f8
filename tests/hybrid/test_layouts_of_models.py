"""Layer: gloo ranks. Critic and reference under layouts of their own: the same PPO step."""

from __future__ import annotations

import pytest

from tests.hybrid import transition_case as case
from tests.hybrid.test_micro_dp import compare
from tests.tiny_models import write_tiny_reward_model
from tests.trainer import run_case

CASES = {
    "actor_tp2_critic_pp2": (2, dict(tp=2), dict(model__critic={"parallel": {"pp": 2}})),
    "actor_tp2_critic_dp2_reference_pp2": (
        2, dict(tp=2),
        dict(model__critic={"parallel": {"tp": 1}}, model__reference={"parallel": {"pp": 2}}),
    ),
    "actor_dp2_critic_tp2": (2, dict(), dict(model__critic={"parallel": {"tp": 2}})),
    "actor_tp2_dp2_critic_pp2_reference_tp4": (
        4, dict(tp=2, sp=True),
        dict(model__critic={"parallel": {"pp": 2}}, model__reference={"parallel": {"tp": 4}}),
    ),
}  # fmt: skip
FAST = ("actor_tp2_critic_pp2",)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES],
)  # fmt: skip
def test_ppo_is_the_same_with_a_layout_for_each_model(ranks, tiny_model_dir, tmp_path, name):
    world, parallel, own = CASES[name]
    folder = str(tiny_model_dir)
    plain = run_case.settings(folder, tmp_path / "a", parallel=parallel)
    other = run_case.settings(folder, tmp_path / "b", parallel=parallel, **own)
    want, got = (ranks(world, case.run, values, 2) for values in (plain, other))
    for rank in range(world):
        assert got[rank]["sequences"] == want[rank]["sequences"]
        for step in range(2):
            compare(got[rank]["metrics"][step], want[rank]["metrics"][step])


VOWELS = "tests.trainer.run_case:vowels"
REWARD = {
    "actor_tp2_reward_pp2": (2, dict(tp=2), dict(pp=2), None),
    "actor_dp2_reward_tp2": (2, dict(), dict(tp=2), VOWELS),
    "actor_tp2_dp2_reward_tp2_pp2": (4, dict(tp=2, sp=True), dict(tp=2, pp=2), None),
    "actor_pp2_dp2_reward_dp4": (4, dict(pp=2), dict(tp=1), VOWELS),
}  # fmt: skip


def run_and_evaluate(rank, world, values):
    """The reward model's layout, the metrics of one step, and the evaluation of one prompt."""
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        layout = trainer.models.reward.groups.layout
        return (layout.tp, layout.pp), trainer.step(), trainer.evaluate()
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if "dp" in n else []) for n in REWARD],
)  # fmt: skip
def test_a_reward_model_scores_the_same_under_its_own_layout(ranks, tiny_model, tmp_path, name):
    """Also where a replica of either layout has no sample: one prompt is evaluated."""
    world, parallel, own, function = REWARD[name]
    folder = str(tiny_model("llama"))
    reward = {"path": str(write_tiny_reward_model(tiny_model("mistral"), tmp_path / "reward"))}
    common = dict(
        parallel=parallel, reward={"function": function} if function else {},
        evaluation={"prompts": 1},
    )  # fmt: skip
    plain = run_case.settings(folder, tmp_path / "a", model__reward=reward, **common)
    other = run_case.settings(
        folder, tmp_path / "b", model__reward=reward | {"parallel": own}, **common
    )
    want, got = (ranks(world, run_and_evaluate, values) for values in (plain, other))
    for rank in range(world):
        layout, metrics, evaluation = got[rank]
        assert layout == (own.get("tp", 1), own.get("pp", 1)) != want[rank][0]
        compare(metrics, want[rank][1])
        assert evaluation == pytest.approx(want[rank][2], rel=1e-4, abs=1e-5)
        assert evaluation["eval/prompts"] == 1 and abs(evaluation["eval/reward_mean"]) > 1e-3


def run_from_foreign_keys(rank, world, values):
    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    try:
        layouts = [m.model.groups.layout for m in (trainer.models.actor, trainer.models.critic)]
        return [(x.tp, x.pp) for x in layouts], trainer.step()
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_shard_strategies_of_other_configurations(ranks, tiny_model_dir, tmp_path):
    """actor_shard_strategy: tensor and critic_shard_strategy: layer are such a pair."""
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, parallel=dict(tp=2), hybrid_engine={
            "enable_3d": True, "actor_shard_strategy": "tensor", "critic_shard_strategy": "layer",
        },
    )  # fmt: skip
    for layouts, metrics in ranks(2, run_from_foreign_keys, values):
        assert layouts == [(2, 1), (1, 2)]
        assert metrics["value/grad_norm"] > 0


def run_watching_memory(rank, world, values):
    """Bytes of gradient buffers whenever a KV cache is made, and what the cache takes."""
    from megatron_rl import Config, Trainer
    from megatron_rl.generation.runner import Runner

    trainer = Trainer(Config.from_dict(values))
    trainables = [trainer.models.actor, trainer.models.critic]
    made, init = [], Runner.__init__

    def gradients(trainable):
        return sum(b.grad_data.untyped_storage().nbytes() for b in trainable._gradient_buffers())

    def watched(self, *args, **kwargs):
        made.append([gradients(t) for t in trainables])
        init(self, *args, **kwargs)

    during, update = [], trainables[0].step

    def stepped():
        during.append([gradients(t) for t in trainables])
        return update()

    trainables[0].step = stepped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "__init__", watched)
        try:
            for _ in range(2):
                trainer.step()
        finally:
            trainer.close()
    return made, during


@pytest.mark.ranks
def test_cache_and_gradient_buffers_never_coexist(ranks, tiny_model_dir, tmp_path):
    """Generation takes the memory that training released; one model's buffers at a time."""
    values = run_case.settings(str(tiny_model_dir), tmp_path)
    for made, during in ranks(2, run_watching_memory, values):
        assert len(made) >= 2 and all(sizes == [0, 0] for sizes in made)
        assert all(actor > 0 and critic == 0 for actor, critic in during)
