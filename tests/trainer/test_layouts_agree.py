"""Layer: gloo ranks. A whole PPO run has the same tokens, metrics and losses on every layout."""

from __future__ import annotations

import pytest

from tests.trainer import run_case

LAYOUTS = {
    "tp2_sp": (2, dict(parallel__tp=2, parallel__sp=True)),
    "pp2": (2, dict(parallel__pp=2)),
    "pp2_vpp2": (2, dict(parallel__pp=2, parallel__vpp=2)),
    "dp2": (2, dict(training__grad_reduce="distributed_optimizer")),
    "tp2_dp2": (4, dict(parallel__tp=2, training__micro_batch_size=3)),
    "tp2_pp2_budget": (
        4,
        dict(parallel__tp=2, parallel__pp=2, training__micro_batch_size=None,
             training__max_tokens_per_micro_batch=80),
    ),
}  # fmt: skip
SLOW = ("pp2", "pp2_vpp2", "tp2_dp2", "tp2_pp2_budget")
NOT_COMPARED = (
    "perf/", "throughput/", "spread/", "memory/", "mfu/", "hardware/", "value/skipped", "drift/",
)  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(ranks, tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    return ranks(1, run_case.run, run_case.settings(str(tiny_model_dir), folder), 3)[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LAYOUTS]
)
def test_ppo_is_the_same_on_every_layout(ranks, tiny_model_dir, tmp_path, one_rank, layout):
    world, changes = LAYOUTS[layout]
    values = run_case.settings(str(tiny_model_dir), tmp_path, **changes)
    results = ranks(world, run_case.run, values, 3)
    for rank, steps in enumerate(results):
        for step, (got, want) in enumerate(zip(steps, one_rank, strict=True)):
            assert set(got) == set(want), f"rank {rank} logs other metrics than one rank"
            for name, value in want.items():
                if name.startswith(NOT_COMPARED):
                    continue
                assert got[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (
                    f"rank {rank} step {step} {name}"
                )
