"""Layer: gloo ranks. Six steps equal three, a save, a load into fresh objects, and three."""

from __future__ import annotations

import pytest

from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case

ADAM = dict(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0)
CASES = {
    "one_rank": dict(world=1, **ADAM),
    "tp2": dict(world=2, tp=2, distributed_optimizer=True, **ADAM),
    "pp2_tied": dict(world=2, pp=2, distributed_optimizer=True, model="llama_tied", **ADAM),
    "dp2": dict(world=2, distributed_optimizer=True, **ADAM),
    "dp2_bf16": dict(world=2, distributed_optimizer=True, dtype="bf16", **ADAM),
    "dp2_bf16_critic": dict(
        world=2, distributed_optimizer=True, dtype="bf16", role="critic", **ADAM
    ),
    "dp2_plain": dict(world=2, **ADAM),
    "tp2_plain_bf16": dict(world=2, tp=2, dtype="bf16", **ADAM),
    "dp2_sgd": dict(world=2, optimizer="sgd", lr=0.05),
    "tp2_sp_sgd_plain": dict(world=2, tp=2, sp=True, optimizer="sgd", lr=0.05),
    "tp2_pp2": dict(world=4, tp=2, pp=2, distributed_optimizer=True, model="llama_tied", **ADAM),
    "pp2_vpp2": dict(world=2, pp=2, vpp=2, distributed_optimizer=True, **ADAM),
    "tp2_dp2": dict(world=4, tp=2, sp=True, distributed_optimizer=True, model="qwen2", **ADAM),
    "padded_heads": dict(world=2, tp=2, distributed_optimizer=True, model="llama_padded_heads",
                         **ADAM),
    "critic_pp2": dict(world=2, pp=2, role="critic", distributed_optimizer=True, **ADAM),
}  # fmt: skip
SLOW = ("tp2_sp_sgd_plain", "padded_heads", "dp2_bf16_critic", "tp2_pp2", "tp2_plain_bf16")


def run(rank, world, folder, model_folder, spec):
    """(six steps, three and three) on this rank."""
    build = dict(spec)
    role = build.get("role", "actor")
    first = case.build(model_folder, world, **build)
    counter = resume.Counter()
    checkpoints = resume.manager(folder, {role: first})
    checkpoints.add_state("counter", counter)
    losses = [resume.train_step(first, 1) for _ in range(3)]
    counter.value = 1 / 3
    checkpoints.save(3)
    losses += [resume.train_step(first, 1) for _ in range(3)]
    whole = resume.outcome(first, losses)

    second, counter = case.build(model_folder, world, **build), resume.Counter()
    again = resume.manager(folder, {role: second})
    again.add_state("counter", counter)
    assert again.latest().name == "step_00000003"
    assert again.load() == 3
    assert counter.value == 1 / 3 and again.notes == []
    resumed = losses[:3] + [resume.train_step(second, 1) for _ in range(3)]
    return whole, resume.outcome(second, resumed)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_six_steps_equal_three_and_three(ranks, tiny_model, tmp_path, name):
    spec = dict(CASES[name])
    world, model = spec.pop("world"), str(tiny_model(spec.pop("model", "llama")))
    for whole, resumed in ranks(world, run, tmp_path, model, spec):
        resume.assert_same(whole, resumed)
        assert len(set(whole["losses"])) == 6, "the case must train"


def warm_up(rank, world, folder, model_folder):
    """A cosine schedule with warm-up is at its place again; its length may be extended."""
    from megatron_rl.config.training import OptimizerSettings
    from megatron_rl.engine.optimizer import Trainable
    from megatron_rl.models.families import read_architecture
    from megatron_rl.models.gpt import build_model
    from megatron_rl.parallel import Layout, ParallelGroups

    groups = ParallelGroups(layout=Layout(world_size=world))
    architecture = read_architecture(model_folder)
    settings = OptimizerSettings(lr=0.01, min_lr=0.001, warmup_steps=2, schedule="cosine")

    def trainable(steps: int) -> Trainable:
        model = build_model("actor", architecture, groups, trainable=True)
        return Trainable(model, settings, total_steps=steps)

    whole, rates = trainable(10), []
    checkpoints = resume.manager(folder, {"actor": whole})
    for step in range(6):
        rates.append(whole.lr)
        whole.schedule.step(1)
        if step == 2:
            checkpoints.save(3)
    again, longer = trainable(10), trainable(20)
    resume.manager(folder, {"actor": again}).load()
    resumed = []
    for _ in range(3):
        resumed.append(again.lr)
        again.schedule.step(1)
    resume.manager(folder, {"actor": longer}).load()
    return rates, resumed, longer.lr


@pytest.mark.ranks
def test_the_schedule_goes_on_where_it_was(ranks, tiny_model, tmp_path):
    ((rates, resumed, longer),) = ranks(1, warm_up, tmp_path, str(tiny_model("llama")))
    assert rates[0] == 0.005 and rates[1] == 0.01 > rates[2] > rates[3], "warm-up, then decay"
    assert resumed == rates[3:]
    assert longer > rates[3]
