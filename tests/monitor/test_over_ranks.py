"""Layer: gloo ranks. Measurements of all ranks meet on each; who is slow is found by its cause."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_rl.monitor.over_ranks import (
    EXTRA,
    RankTable,
    gather_table,
    hardware_metrics,
    memory_metrics,
    rank_metrics,
    slowest_seconds,
    straggler_metrics,
    time_metrics,
)
from megatron_rl.monitor.phases import FIELDS, PHASES, PhaseTimer, PhaseUse


def table(seconds: dict[str, list[float | None]], busy: list[float] | None = None) -> RankTable:
    """A table of given seconds; None where a rank did not run the phase."""
    ranks = len(next(iter(seconds.values())))
    uses_RPF = torch.full((ranks, len(PHASES), len(FIELDS)), math.nan, dtype=torch.float64)
    for phase, values in seconds.items():
        for rank, value in enumerate(values):
            if value is not None:
                uses_RPF[rank, PHASES.index(phase)] = 0.0
                uses_RPF[rank, PHASES.index(phase), FIELDS.index("seconds")] = value
    nan_R = torch.full((ranks,), math.nan, dtype=torch.float64)
    busy_R = nan_R if busy is None else torch.tensor(busy, dtype=torch.float64)
    return RankTable(uses_RPF=uses_RPF, extra={n: nan_R for n in EXTRA} | {"busy_share": busy_R})


def gathered(rank, world):
    uses = {"generation": PhaseUse(seconds=1.0 + rank, allocated=2e9 * rank, resident=1e9)}
    if rank == 1:
        uses["evaluation"] = PhaseUse(seconds=6.0, fragmented=3e9)
    extra = {"busy_share": 0.5 + rank / 10, "watts": 100.0, "elapsed": 9.0, "eta": 5.0 + rank}
    found = gather_table(uses, extra, torch.device("cpu"))
    return rank_metrics(found, on_gpu=True), slowest_seconds(found), found.extra["eta"].tolist()


@pytest.mark.ranks
def test_every_rank_gets_the_same_table(ranks):
    first, second = ranks(2, gathered)
    assert first == second
    metrics, slowest, eta = first
    assert metrics["perf/generation_seconds"] == 1.5 and metrics["perf/evaluation_seconds"] == 3.0
    assert metrics["spread/generation"] == 2.0 and metrics["spread/straggler_rank"] == 1.0
    assert slowest == {"generation": 2.0, "evaluation": 6.0} and eta == [5.0, 6.0]
    assert metrics["memory/generation_allocated_gb"] == 2.0 == metrics["perf/gpu_memory_gb"]
    assert metrics["memory/evaluation_fragmented_gb"] == 3.0
    assert metrics["perf/host_memory_gb"] == 1.0
    assert {tag: value for tag, value in metrics.items() if tag.startswith("hardware/")} == {
        "hardware/busy_share": pytest.approx(0.55), "hardware/busy_share_min": 0.5,
        "hardware/busy_share_max": pytest.approx(0.6), "hardware/power_watts": 200.0,
    }  # fmt: skip


def test_the_cause_counts_and_not_the_waiting_that_follows():
    late = table({"generation": [5, 5, 9, 5], "old_logprobs": [6.1, 6.1, 2, 6]})
    assert straggler_metrics(late) == {
        "spread/straggler_seconds": 4.0, "spread/straggler_rank": 2.0
    }  # fmt: skip


def test_waiting_may_take_a_little_longer_than_its_cause():
    """Two ranks: what the first waits for, and its own noise."""
    late = table({"generation": [5.0, 9.0], "old_logprobs": [6.5, 2.0]})
    assert straggler_metrics(late) == {
        "spread/straggler_seconds": 4.0, "spread/straggler_rank": 1.0
    }  # fmt: skip


def test_the_first_loss_counts_from_half_of_the_largest_on():
    rng = random.Random()
    for share, rank in ((rng.uniform(0.51, 0.99), 2.0), (rng.uniform(0.01, 0.49), 0.0)):
        most = rng.uniform(1.0, 9.0)
        late = table({"generation": [5, 5, 5 + share * most, 5], "values": [1 + most, 1, 1, 1]})
        assert straggler_metrics(late)["spread/straggler_rank"] == rank, (share, most)


def test_small_noise_before_the_cause_does_not_hide_it():
    late = table({"generation": [5.2, 5, 5, 5], "values": [1, 1, 1, 4.0]})
    assert straggler_metrics(late)["spread/straggler_rank"] == 3.0


def test_ranks_of_one_replica_count_as_its_lowest():
    late = table({"generation": [5, 5, 8.9, 9, 5, 5]})
    found = straggler_metrics(late)
    assert found["spread/straggler_rank"] == 2.0 and found["spread/straggler_seconds"] == 4.0


def test_what_no_rank_can_read_is_absent():
    unread = table({"scoring": [1.0, None]})
    assert hardware_metrics(unread) == {}
    assert hardware_metrics(table({"scoring": [1.0, 2.0]}, busy=[0.2, math.nan])) == {}
    assert time_metrics(unread)["perf/scoring_seconds"] == 0.5
    assert memory_metrics(unread, on_gpu=False) == {
        "memory/scoring_resident_gb": 0.0, "perf/host_memory_gb": 0.0
    }  # fmt: skip


def test_phases_add_up_and_keep_the_peak():
    timer = PhaseTimer(torch.device("cpu"))
    seen = []
    timer.on_enter = seen.append
    for _ in range(2):
        with timer.phase("scoring"):
            assert timer.current == "scoring"
    uses = timer.take()
    assert seen == ["scoring"] * 2 and timer.current is None and timer.take() == {}
    assert uses["scoring"].seconds > 0 and uses["scoring"].resident > 1e7
    first = PhaseUse(seconds=1.0, allocated=5.0, reserved=1.0)
    first.add(PhaseUse(seconds=2.0, allocated=3.0, reserved=7.0))
    assert (first.seconds, first.allocated, first.reserved) == (3.0, 5.0, 7.0)


def test_an_error_in_a_phase_can_be_explained():
    timer = PhaseTimer(torch.device("cpu"))
    timer.on_error = lambda phase, error: (
        RuntimeError(f"{phase}: {error}") if "dear" in str(error) else None
    )
    with pytest.raises(RuntimeError, match="scoring: oh dear") as caught, timer.phase("scoring"):
        raise ValueError("oh dear")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyError, match="other"), timer.phase("values"):
        raise KeyError("other")
    assert timer.current is None and timer.take() == {}
    with pytest.raises(AssertionError, match="'lunch' is not one of"), timer.phase("lunch"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_peak_memory_of_a_gpu_belongs_to_its_phase():
    timer = PhaseTimer(torch.device("cuda"))
    with timer.phase("generation"):
        cache = torch.empty(10**9, dtype=torch.uint8, device="cuda")
        del cache
    with timer.phase("values"):
        torch.empty(10**6, dtype=torch.uint8, device="cuda")
    uses = timer.take()
    assert 1e9 <= uses["generation"].allocated < 1.2e9
    assert uses["values"].allocated < 1e8 and uses["values"].reserved >= 1e9
