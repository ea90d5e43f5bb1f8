"""A stop in every phase. Layer: the real train_ppo.py on two gloo ranks, real signals.

What is resumed must be bitwise the run that nobody disturbed, also where the step was left.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_rl import exit_codes
from tests.operate.train_processes import Attempt, Deed, rows
from tests.trainer import run_case

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
STEPS = 14
# Phases that a stop leaves, in which the step is done again, and those that it finishes.
LEFT = ("generation", "scoring", "old_logprobs", "ref_logprobs", "values", "evaluation")
FINISHED = ("checkpoint", "update_critic", "update_actor")


def settings(model, folder, **changes):
    changes = {
        "training__steps": STEPS, "parallel__tp": 2, "checkpoint__save_interval": 4,
        "evaluation__interval": 3, "rollout__batch_size": 4, "training__mini_batch_size": 4,
        **changes,
    }  # fmt: skip
    return run_case.settings(str(model), folder, **changes)


def saved_step(folder: Path) -> int:
    checkpoints = folder / "run/checkpoints"
    latest = checkpoints / (checkpoints / "latest").read_text().strip()
    return json.loads((latest / "manifest.json").read_text())["step"]


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    attempt = Attempt(folder, settings(tiny_model_dir, folder), 2)
    assert attempt.wait() == [0, 0], attempt.said
    return rows(folder)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async_save"])
def test_a_stop_in_every_phase_saves_and_resumes_bitwise(
    tiny_model_dir, tmp_path, undisturbed, asynchronous
):
    """One run, stopped in one phase after the other: on either rank, by either signal, also by two
    in a row. Every attempt gets past the step that was left before."""
    values = settings(tiny_model_dir, tmp_path, checkpoint__async_save=asynchronous)
    phases = ("checkpoint", "generation") if asynchronous else (*FINISHED, *LEFT)
    for i, phase in enumerate(phases):
        visit = 1 if phase in ("evaluation", *FINISHED) else 2
        deed = Deed(i % 2, phase, ((TERM, USR1), (USR1,), (TERM,), (TERM, TERM))[i % 4], visit)
        attempt = Attempt(tmp_path, values, 2, deed)
        assert attempt.wait() == [exit_codes.REQUEUE] * 2, f"{deed}\n{attempt.said}"
        done = rows(tmp_path)[-1]["step"]
        assert f"stopped after step {done}; its state is on disk" in attempt.said
        assert saved_step(tmp_path) == done
        assert done < STEPS, "there must be something left to stop in"
    attempt = Attempt(tmp_path, values, 2)
    assert attempt.wait() == [0, 0], attempt.said
    assert rows(tmp_path) == undisturbed


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stop_before_the_first_step_leaves_nothing_and_asks_for_a_requeue(
    tiny_model_dir, tmp_path, undisturbed
):
    values = settings(tiny_model_dir, tmp_path)
    attempt = Attempt(tmp_path, values, 2, Deed(1, "generation", (USR1,)))
    assert attempt.wait() == [exit_codes.REQUEUE] * 2, attempt.said
    assert not (tmp_path / "run/checkpoints/latest").exists()
    attempt = Attempt(tmp_path, values, 2)
    assert attempt.wait() == [0, 0], attempt.said
    assert rows(tmp_path) == undisturbed
