"""Layer: gloo ranks. Six steps of PPO equal three, a kill -9, a resume and three, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.rank_files import rank_file, read_rank_file
from tests.rank_pool import RankError, RankPools
from tests.trainer import resume_run

LAYOUTS = {
    "tp2": (2, dict(parallel__tp=2, parallel__sp=True)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2": (2, dict(checkpoint__async_save=True)),
    "tp2_pp2": (4, dict(parallel__tp=2, parallel__pp=2)),
    "dp2_int8": (
        2,
        dict(training__gradient_compression={
            "enable": True, "error_feedback": True, "stochastic_rounding": True,
            "min_bucket_elements": 0,
        }),
    ),
    "dp2_bf16": (2, dict(training__dtype="bf16")),
    "experts_tp2_ep2": (2, dict(parallel__tp=2, parallel__ep=2, parallel__sp=True)),
}  # fmt: skip


def model_of(case: str) -> str:
    """The tiny model of a case."""
    return "qwen3_moe" if case.startswith("experts") else "llama"


def assert_bitwise(got: Any, want: Any, place: str) -> None:
    """Equality of nested results; tensors bit by bit, numbers by `==` with NaN equal to NaN."""
    assert type(got) is type(want), place
    if isinstance(want, dict):
        assert got.keys() == want.keys(), place
        for key in want:
            assert_bitwise(got[key], want[key], f"{place} {key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, place
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (got, want)]
        assert torch.equal(*bits), f"{place} differs"
    else:
        assert got == want or (got != got and want != want), f"{place}: {got} instead of {want}"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_steps_equal_three_kill_and_three(ranks, tiny_model, tmp_path, layout):
    world, changes = LAYOUTS[layout]
    model = str(tiny_model(model_of(layout)))
    whole = ranks(
        world, resume_run.run, resume_run.settings(model, tmp_path / "whole", **changes), None
    )
    values = resume_run.settings(model, tmp_path / "killed", **changes)
    doomed = RankPools()
    with pytest.raises(RankError, match=f"rank {world - 1}:\nthe process died"):
        doomed(world, resume_run.run, values, 5)
    doomed.close()
    resumed = ranks(world, resume_run.run, values, None)
    for rank, (got, want) in enumerate(zip(resumed, whole, strict=True)):
        assert (want["start"], got["start"]) == (0, 3) and got["notes"] == []
        coefficients = [step["kl_coef"] for step in want["steps"]]
        assert len(set(coefficients)) == 6, "the coefficient must move"
        want["steps"] = want["steps"][3:]
        for step, (mine, theirs) in enumerate(zip(got["steps"], want["steps"], strict=True), 4):
            assert_bitwise(mine, theirs, f"rank {rank} step {step}")
        for part in ("prompts", "tensors"):
            assert_bitwise(got[part], want[part], f"rank {rank}")
    assert_holds_everything(tmp_path / "killed/run/checkpoints/step_00000006", values)


def assert_holds_everything(folder: Path, values: dict) -> None:
    """Every part of a run's state has its place in the checkpoint."""
    state = json.loads((folder / "state.json").read_text())
    assert set(state["roles"]) == {"actor", "critic"}
    assert set(state["states"]) == {"trainer", "kl", "prompts"}
    for role in state["roles"].values():
        assert role["optimizer"]["step"] > 0 and role["optimizer"]["states"]
        assert role["trainable"]["schedule"]["num_steps"] > 0
    assert {"epoch", "position", "seed", "shuffle"} <= set(state["states"]["prompts"])
    assert state["config"]["training"]["steps"] == values["training"]["steps"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"megatron-rl", "torch", "megatron-core"} <= set(manifest["versions"])
    rank = read_rank_file(rank_file(folder, 0))
    assert {"python", "numpy", "torch", "tracker"} <= set(rank["rng"])
    compressed = values["training"].get("gradient_compression")
    assert any("gradient_compression" in name for name in rank) == bool(compressed)


OTHER_LAYOUTS = {
    "tp2_pp2_to_tp4": (dict(parallel__tp=2, parallel__pp=2), dict(parallel__tp=4), 4, 4),
    "dp2_to_dp4": (dict(), dict(), 2, 4),
    "experts_tp2_ep2_to_pp2": (
        dict(parallel__tp=2, parallel__ep=2, parallel__sp=True), dict(parallel__pp=2), 2, 2,
    ),
    "experts_tp2_to_tp4_ep4": (
        dict(parallel__tp=2, parallel__sp=True),
        dict(parallel__tp=4, parallel__ep=4, parallel__sp=True), 2, 4,
    ),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_resume_under_another_layout(ranks, tiny_model, tmp_path, name):
    """Steps 4 to 6 as if nothing had changed, up to rounding; what is lost is said."""
    before, after, world, new_world = OTHER_LAYOUTS[name]
    model = str(tiny_model(model_of(name)))
    values = resume_run.settings(model, tmp_path / "run", **before)
    want = ranks(world, resume_run.run, values, None)[0]
    (tmp_path / "run" / "run" / "checkpoints" / "step_00000006").rename(tmp_path / "later")
    values = resume_run.settings(model, tmp_path / "run", **after)
    for got in ranks(new_world, resume_run.run, values, None):
        assert got["start"] == 3
        assert any("rng" in n and "does not carry over" in n for n in got["notes"]), got["notes"]
        for mine, theirs in zip(got["steps"], want["steps"][3:], strict=True):
            assert mine["kl_coef"] == pytest.approx(theirs["kl_coef"], rel=1e-6)
            for key, value in theirs["metrics"].items():
                if key.startswith(("drift/", "value/skipped")):
                    continue
                assert mine["metrics"][key] == pytest.approx(value, abs=1e-3, rel=1e-3), key
        assert got["prompts"] == want["prompts"]
