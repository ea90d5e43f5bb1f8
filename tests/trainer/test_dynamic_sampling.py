"""Layer: gloo ranks. Dynamic sampling and the full KL in whole runs: layouts, exact resume.

The parts alone are in tests/rollout/test_exchange.py.
"""

from __future__ import annotations

import pytest

from tests.trainer import run_case
from tests.trainer.test_layouts_agree import NOT_COMPARED


def values(model, folder, **changes):
    return run_case.settings(
        str(model), folder,
        **{
            "algorithm__name": "grpo",
            "algorithm__kl": {"placement": "loss", "estimator": "full", "coef": 0.05},
            # Small steps: this model's gradients are steep enough to make rounding visible.
            "training__actor": {"lr": 2e-4, "eps": 1e-3},
            "algorithm__dynamic_sampling": {"enable": True, "max_batches": 8},
            "rollout__n": 3, "rollout__batch_size": 4,
            "training__mini_batch_size": 6, "training__epochs": 1,
            "reward": {"function": "tests.trainer.run_case:starts_small"}, **changes,
        },
    )  # fmt: skip


def assert_same(got, want):
    got, want = (
        {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}
        for metrics in (got, want)
    )
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


@pytest.fixture(scope="module")
def one_rank(ranks, tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    return ranks(1, run_case.run, values(tiny_model_dir, folder), 4)[0]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world, changes", [(2, {}), (4, {"parallel__tp": 2})])
def test_dynamic_sampling_is_the_same_on_every_layout(
    ranks, tiny_model_dir, tmp_path, one_rank, world, changes
):
    assert max(m["sampling/batches"] for m in one_rank) > 1, "the case must have to draw again"
    assert all(0 < m["reward/mean"] < 1 for m in one_rank), "only mixed groups are kept"
    assert one_rank[-1]["kl/loss"] > 1e-4, "the policy has moved away from the reference"
    for steps in ranks(world, run_case.run, values(tiny_model_dir, tmp_path, **changes), 4):
        for got, want in zip(steps, one_rank, strict=True):
            assert_same(got, want)


def stop_and_go_on(rank, world, settings):
    """Two steps, a save, and two steps of a new trainer."""
    from megatron_rl import Config, Trainer

    metrics = []
    for _ in range(2):
        trainer = Trainer(Config.from_dict(settings))
        metrics += [trainer.step(), trainer.step()]
        trainer.save()
        trainer.close()
    return metrics


@pytest.mark.ranks
def test_dynamic_sampling_resumes_exactly(ranks, tiny_model_dir, tmp_path, one_rank):
    """Prompts and request numbers go on behind everything that was drawn, kept or not."""
    results = ranks(1, stop_and_go_on, values(tiny_model_dir, tmp_path))[0]
    for got, want in zip(results, one_rank, strict=True):
        assert_same(got, want)


@pytest.mark.ranks
@pytest.mark.slow
def test_mini_batch_of_fewer_prompts_than_replicas(ranks, tiny_model_dir, tmp_path):
    """A replica without samples in a mini-batch still takes part in it."""
    steps = []
    for world in (1, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        settings = values(
            tiny_model_dir, folder, algorithm__dynamic_sampling={"enable": False},
            rollout__n=4, training__mini_batch_size=4, training__micro_batch_size=1,
        )  # fmt: skip
        steps.append(ranks(world, run_case.run, settings, 2)[0])
    for got, want in zip(*steps, strict=True):
        assert_same(got, want)
