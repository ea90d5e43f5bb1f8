"""Pure: the choice of a generation layout; one run lets it choose."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest

from megatron_rl.resharding.cost_model import Speeds, Work, choose, estimate
from tests.trainer import run_case

H200 = Speeds(link=275e9, latency=20e-6, read=4.25e12, arithmetic=700e12)
LLAMA = Work(
    model_bytes=16 * 10**9, parameters=8 * 10**9, layers=32, hidden=4096, element_bytes=2,
    sequences=256, new_tokens=512, max_running=256, free_bytes=60 * 10**9,
)  # fmt: skip
ALL = [(1, 1), (2, 1), (4, 1), (8, 1)]


def test_numbers_by_hand():
    """8B at t=8 → t_g=2: 6 GB received; a replica of 64 sequences reads 8 GB per step."""
    got = estimate(LLAMA, H200, t=8, p=1, t_g=2, p_g=1)
    assert got.resharding == pytest.approx(6e9 / 275e9)
    assert got.compute == pytest.approx(8e9 / 4.25e12)
    wire = 64 * 4096 * 2 / 275e9
    assert got.exchange == pytest.approx(64 * (20e-6 + wire))
    assert (got.steps, got.extra_bytes, got.fits) == (512, 8 * 10**9, True)
    assert got.seconds == pytest.approx(6e9 / 275e9 + 512 * (got.compute + got.exchange))


def test_arithmetic_binds_large_batches_and_waves_add_steps():
    many = replace(LLAMA, sequences=8192)
    got = estimate(many, H200, t=2, p=1, t_g=1, p_g=1)
    assert got.compute == pytest.approx(max(16e9 / 4.25e12, 2 * 8e9 * 256 / 700e12))
    assert got.steps == 512 * math.ceil(4096 / 256)


def test_pipelines_pay_for_their_stages():
    """Stages of a decode step run one after the other: p_g gains no reading, only memory."""
    one = estimate(LLAMA, H200, t=1, p=4, t_g=1, p_g=1)
    two = estimate(LLAMA, H200, t=1, p=4, t_g=1, p_g=2)
    assert one.compute <= two.compute and two.exchange > one.exchange == 0
    assert two.extra_bytes == one.extra_bytes // 2


def test_the_training_layout_costs_no_move():
    same = estimate(LLAMA, H200, t=8, p=1, t_g=8, p_g=1)
    assert same.resharding == 0 and same.extra_bytes == 0 and same.fits


@pytest.mark.parametrize(
    ("work", "speeds", "best"),
    [
        # A slow network makes every all-reduce dear: whole models generate fastest.
        (LLAMA, replace(H200, latency=2e-3), (1, 1)),
        # One short answer on a fast network: reading the weights from all ranks at once wins.
        (replace(LLAMA, sequences=1, new_tokens=8), replace(H200, latency=1e-7), (8, 1)),
        # No memory: nothing but the training layout fits.
        (replace(LLAMA, free_bytes=0), replace(H200, latency=2e-3), (8, 1)),
        (replace(LLAMA, free_bytes=5 * 10**9), replace(H200, latency=2e-3), (4, 1)),
        # Moving the weights costs more than it saves.
        (replace(LLAMA, new_tokens=1), replace(H200, link=1e9, latency=1e-6), (8, 1)),
    ],
)
def test_choice(work, speeds, best):
    chosen, estimates = choose(work, speeds, t=8, p=1, layouts=ALL)
    assert (chosen.tp, chosen.pp) == best, [str(e) for e in estimates]
    assert len(estimates) == len(ALL)
    assert f"{chosen.steps} steps" in str(chosen)


def test_no_room_for_what_the_user_asked_for():
    with pytest.raises(ValueError, match="no generation layout of .* 0 bytes.*zero_repart"):
        choose(replace(LLAMA, free_bytes=0), H200, t=8, p=1, layouts=[(1, 1)])


def run_auto(rank, world, values):
    from megatron_rl import Config, Trainer

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_rl").addHandler(handler)
    trainer = Trainer(Config.from_dict(values))
    try:
        layout = trainer.models.transition.engine.model.groups.layout
        metrics = trainer.step()
        return (layout.tp, layout.pp), metrics["reward/mean"], "\n".join(lines)
    finally:
        trainer.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_auto_chooses_on_every_rank_alike_and_can_be_overridden(ranks, tiny_model_dir, tmp_path):
    """On gloo an all-reduce costs more than a tiny model: whole models generate."""
    runs = {}
    for name, engine in (
        ("plain", {}), ("auto", {"mode": "auto"}), ("given", {"mode": "auto", "generation_tp": 2}),
    ):  # fmt: skip
        values = run_case.settings(
            str(tiny_model_dir), tmp_path / name, parallel={"tp": 2}, hybrid_engine=engine
        )
        runs[name] = ranks(2, run_auto, values)
        for _, _, log in runs[name]:
            assert ("hybrid_engine.mode auto" in log and "steps ×" in log) == (name != "plain"), log
    assert [r[0] for r in runs["auto"]] == [(1, 1)] * 2
    assert [r[0] for r in runs["given"]] == [(2, 1)] * 2
    assert len({round(r[1], 6) for results in runs.values() for r in results}) == 1
