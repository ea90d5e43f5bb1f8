"""A rank is killed, freezes or hangs in a phase. Layer: the real train_ppo.py, two gloo ranks."""

from __future__ import annotations

import random
import time

import pytest

from megatron_rl import exit_codes
from tests.operate.train_processes import FREEZE, HANG, KILL, Attempt, Deed
from tests.trainer import run_case

PHASES = (
    "generation", "scoring", "old_logprobs", "ref_logprobs", "values", "advantages",
    "update_critic", "update_actor", "checkpoint", "evaluation",
)  # fmt: skip


def settings(model, folder, **changes):
    changes = {
        "training__steps": 1000, "parallel__tp": 2, "checkpoint__save_interval": 1,
        "evaluation__interval": 1, "rollout__batch_size": 4, "training__mini_batch_size": 4,
        "runtime__device": "cpu", **changes,
    }  # fmt: skip
    return run_case.settings(str(model), folder, **changes)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_at_a_random_step_is_noticed_within_60_seconds(
    tiny_model_dir, tmp_path, phase
):
    draw = random.Random(phase)
    rank = draw.randrange(2)
    deed = Deed(rank, phase, (KILL,), visit=draw.randrange(1, 4))
    attempt = Attempt(tmp_path, settings(tiny_model_dir, tmp_path), 2, deed)
    assert attempt.wait(rank) == [-KILL], attempt.said
    killed = time.monotonic()
    assert attempt.wait(1 - rank, seconds=60) == [exit_codes.LOST_RANK], attempt.said
    assert time.monotonic() - killed < 60
    # With rank 0 the rendezvous may go, too; then that is what can be said.
    named = f"rank {rank}'s process is dead" in attempt.said
    assert named or (rank == 0 and "rank 0's process or its launcher" in attempt.said), attempt.said


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["scoring", "update_actor"])
def test_a_frozen_rank_is_noticed(tiny_model_dir, tmp_path, phase):
    """Its connections stay open: only its silence tells."""
    values = settings(tiny_model_dir, tmp_path, runtime__heartbeat_timeout=6.0)
    attempt = Attempt(tmp_path, values, 2, Deed(1, phase, (FREEZE,), visit=2))
    try:
        assert attempt.wait(0) == [exit_codes.LOST_RANK], attempt.said
    finally:
        attempt.end()
    assert "rank 1 has given no sign of life for 6 s" in attempt.said
    assert "rank 1 does not react" in attempt.said


@pytest.mark.ranks
@pytest.mark.slow
def test_a_hanging_rank_is_named_with_its_phase_and_the_collective_of_the_other(
    tiny_model_dir, tmp_path
):
    values = settings(tiny_model_dir, tmp_path, runtime__collective_timeout=20.0)
    attempt = Attempt(tmp_path, values, 2, Deed(0, "scoring", (HANG,), visit=2))
    assert attempt.wait() == [exit_codes.CRASH] * 2, attempt.said
    said = attempt.said
    assert "rank 0 hangs in step 2, scoring at operate/train_processes.py:" in said, said
    assert "in commit, in no collective; rank 1 waits for it" in said
    assert "rank 1 on" in said and "in broadcast over ranks [0, 1]" in said
    (file,) = (tmp_path / "run/logs").glob("watchdog-*.txt")
    assert "stacks of rank 0" in file.read_text() and "stacks of rank 1" in file.read_text()
