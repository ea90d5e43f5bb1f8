"""Layer: gloo ranks. PPO on a mixture of experts is the same on every layout, replay included."""

from __future__ import annotations

import re

import pytest

from tests.trainer import run_case
from tests.trainer.test_layouts_agree import NOT_COMPARED
from tests.trainer.test_metrics import DOCS

LAYOUTS = {
    "tp2_ep2": (2, dict(parallel__tp=2, parallel__ep=2, parallel__sp=True)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2": (2, dict(training__grad_reduce="distributed_optimizer")),
    "tp2_pp2_ep2": (4, dict(parallel__tp=2, parallel__pp=2, parallel__ep=2, parallel__sp=True)),
    "tp4_ep2_budget": (
        4,
        dict(parallel__tp=4, parallel__ep=2, parallel__sp=True, training__micro_batch_size=None,
             training__max_tokens_per_micro_batch=80),
    ),
    "tp2_ep1_dp2": (4, dict(parallel__tp=2, parallel__sp=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(ranks, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    values = run_case.settings(str(tiny_model("qwen3_moe")), folder)
    return ranks(1, run_case.run, values, 3)[0]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_is_the_same_on_every_layout(ranks, tiny_model, tmp_path, one_rank, layout):
    world, changes = LAYOUTS[layout]
    values = run_case.settings(str(tiny_model("qwen3_moe")), tmp_path, **changes)
    for rank, steps in enumerate(ranks(world, run_case.run, values, 3)):
        for step, (got, want) in enumerate(zip(steps, one_rank, strict=True)):
            assert set(got) == set(want), f"rank {rank} logs other metrics than one rank"
            assert got["experts/load_max"] > 1 and "experts/replay_changed" in got
            documented = set(re.findall(r"`(experts/\w+)`", DOCS.read_text()))
            assert documented == {tag for tag in got if tag.startswith("experts/")}
            for name, value in want.items():
                if not name.startswith(NOT_COMPARED):
                    assert got[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (
                        f"rank {rank} step {step} {name}"
                    )


@pytest.mark.ranks
@pytest.mark.slow
def test_replay_keeps_training_on_what_was_sampled(ranks, tiny_model, tmp_path):
    """In bf16 the router changes its mind between generation and training, unless replayed."""
    drift = {}
    for replay in (True, False):
        values = run_case.settings(
            str(tiny_model("qwen3_moe")), tmp_path / str(replay), rollout__router_replay=replay,
            training__dtype="bf16", rollout__batch_size=16, rollout__n=4,
            rollout__max_new_tokens=48, training__mini_batch_size=64, training__epochs=1,
            training__micro_batch_size=8, algorithm__name="grpo",
        )  # fmt: skip
        steps = ranks(1, run_case.run, values, 3)[0]
        drift[replay] = [(s["drift/mean_abs"], s["drift/max_abs"]) for s in steps]
        print(f"replay {replay}: mean, largest |Δ log-prob| {drift[replay]}")
    for (mean, largest), (free_mean, free_largest) in zip(drift[True], drift[False], strict=True):
        assert mean < free_mean and largest < 0.5 * free_largest


@pytest.mark.ranks
@pytest.mark.slow
def test_a_dense_critic_stands_beside_experts(ranks, tiny_model, tmp_path):
    """`parallel.ep` concerns the models that have experts; the others are cut as ever."""
    values = run_case.settings(
        str(tiny_model("qwen3_moe")), tmp_path, parallel__tp=2, parallel__ep=2, parallel__sp=True,
        model__critic={"path": str(tiny_model("llama"))},
    )  # fmt: skip
    for steps in ranks(2, run_case.run, values, 2):
        assert all(step["value/skipped_steps"] == 0 for step in steps)
        assert steps[-1]["experts/load_max"] > 1
