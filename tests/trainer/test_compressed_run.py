"""Layer: gloo ranks. PPO with int8 gradients: follows fp32, and resumes bit for bit."""

from __future__ import annotations

import pytest

from tests.trainer import run_case
from tests.trainer.resume_run import OF_THE_MACHINE


def run_saving(rank, world, values, steps):
    """Runs (or resumes) to `steps` steps, saving; returns metrics and the actor's weights."""
    import torch

    from megatron_rl import Config, Trainer

    trainer = Trainer(Config.from_dict(values))
    metrics = []
    try:
        while trainer.step_count < steps:
            metrics.append(trainer.step())
        trainer.save()
        weights = [p.detach().clone() for _, p in trainer.models.actor.model.named_parameters()]
        return metrics, torch.cat([w.flatten() for w in weights])
    finally:
        trainer.close()


COMPRESSION = {"enable": True, "error_feedback": True, "min_bucket_elements": 0}


@pytest.mark.ranks
@pytest.mark.parametrize("fusion", [False, True])
def test_compressed_ppo_follows_fp32(ranks, tiny_model_dir, tmp_path, fusion):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = run_case.settings(str(tiny_model_dir), tmp_path / "a")
    packed = run_case.settings(
        str(tiny_model_dir), tmp_path / "b",
        training__gradient_compression={**COMPRESSION, "allreduce_fusion": fusion},
    )  # fmt: skip
    want = ranks(2, run_case.run, plain, 2)[0]
    got = ranks(2, run_case.run, packed, 2)[0]
    assert got[0]["policy/grad_norm"] == pytest.approx(want[0]["policy/grad_norm"], rel=0.02)
    assert got[0]["policy/grad_norm"] != want[0]["policy/grad_norm"], "nothing was compressed"
    assert got[0]["value/loss"] == pytest.approx(want[0]["value/loss"], rel=0.05)


@pytest.mark.ranks
@pytest.mark.slow
def test_compressed_ppo_resumes_bit_for_bit(ranks, tiny_model_dir, tmp_path):
    changes = dict(
        parallel__tp=2, training__gradient_compression=COMPRESSION, training__steps=4
    )
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = run_case.settings(str(tiny_model_dir), tmp_path / "whole", **changes)
    parts = run_case.settings(str(tiny_model_dir), tmp_path / "parts", **changes)
    expected = ranks(4, run_saving, whole, 4)
    first = ranks(4, run_saving, parts, 2)
    second = ranks(4, run_saving, parts, 4)
    for rank in range(4):
        joined = first[rank][0] + second[rank][0]
        for got, want in zip(joined, expected[rank][0], strict=True):
            assert {k: v for k, v in got.items() if not k.startswith(OF_THE_MACHINE)} == {
                k: v for k, v in want.items() if not k.startswith(OF_THE_MACHINE)
            }
        assert second[rank][1].equal(expected[rank][1])
