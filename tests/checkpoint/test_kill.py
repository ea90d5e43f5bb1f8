"""Layer: real processes. A rank is killed with SIGKILL; what resumes is bitwise the same run.

Every crash gets its own pool of ranks, since the killed one takes its group with it.
"""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

from megatron_rl.checkpoint import faults
from megatron_rl.checkpoint.folder import checkpoints as list_checkpoints
from tests.checkpoint import resume_case as resume
from tests.engine import training_case as case
from tests.rank_pool import RankError, RankPools

STEPS = 4
BUILD = dict(optimizer="adam", lr=1e-2, distributed_optimizer=True, dtype="bf16")


class Calls:
    """Counts function calls of the main thread; kills the process at the `fatal`-th.

    A moment in units of calls does not depend on how fast the machine is.
    """

    def __init__(self, fatal: int | None) -> None:
        self.count, self.fatal = 0, fatal

    def __call__(self, frame, event, argument) -> None:
        self.count += event == "call"
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank, world, folder, model, fault, kill_at, async_save):
    """Resumes if there is something, trains to the last step with a save after each.

    Args:
        fault: see megatron_rl.checkpoint.faults.
        kill_at: (rank, number of function calls) at which it is killed.

    Returns:
        The step it started from, what came out, and its function calls.
    """
    os.environ.pop(faults.VARIABLE, None)
    if fault:
        os.environ[faults.VARIABLE] = fault
    trainable = case.build(model, world, **BUILD)
    losses = resume.Losses()
    checkpoints = resume.manager(folder, {"actor": trainable}, async_save=async_save)
    checkpoints.add_state("losses", losses)
    start = checkpoints.load() or 0
    calls = Calls(kill_at[1] if kill_at and kill_at[0] == rank else None)
    sys.setprofile(calls)
    for step in range(start + 1, STEPS + 1):
        losses.values.append(resume.train_step(trainable, 1))
        checkpoints.save(step)
    sys.setprofile(None)
    checkpoints.close()
    return start, resume.outcome(trainable, losses.values), calls.count


def run(world, *args):
    pools = RankPools()
    try:
        return pools(world, train, *args)
    finally:
        pools.close()


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("whole"), str(tiny_model("llama")), None, None, False)


def assert_resumes(folder, model, undisturbed, *, expected_start=None, async_save=False):
    results = run(2, folder, model, None, None, async_save)
    for (start, outcome, _), (_, whole, _) in zip(results, undisturbed, strict=True):
        if expected_start is not None:
            assert start == expected_start
        resume.assert_same(whole, outcome)
    assert not list(folder.glob(".step_*")), "nothing half-written is left"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("point", faults.POINTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_kill_at_each_point_of_a_save(tiny_model, tmp_path, undisturbed, point, rank):
    """Killed in the second save: before its folder has its name, step 1 is the newest."""
    if rank == 1 and not point.endswith(("shard", "fsync")):
        pytest.skip("only rank 0 passes this point")
    model = str(tiny_model("llama"))
    with pytest.raises(RankError):
        run(2, tmp_path, model, f"{point}:2@{rank}", None, False)
    published = point in ("after_rename", "before_latest", "after_latest")
    names = [path.name for path, _ in list_checkpoints(tmp_path)]
    assert names[0] == ("step_00000002" if published else "step_00000001")
    assert_resumes(tmp_path, model, undisturbed, expected_start=2 if published else 1)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("point", ["after_shard", "before_rename"])
def test_kill_in_a_background_save(tiny_model, tmp_path, undisturbed, point):
    model = str(tiny_model("llama"))
    with pytest.raises(RankError):
        run(2, tmp_path, model, f"{point}:2@0", None, True)
    assert_resumes(tmp_path, model, undisturbed, expected_start=1, async_save=True)


@pytest.mark.ranks
@pytest.mark.slow
def test_kill_at_random_moments(tiny_model, tmp_path, undisturbed):
    """Ten kills in one run, each within 1.3 steps of the start; then it ends as if undisturbed."""
    draw, model, kills = random.Random(20), str(tiny_model("llama")), 0
    for _ in range(10):
        rank = draw.randrange(2)
        calls = undisturbed[rank][2] / STEPS * draw.uniform(0.0, 1.3)
        try:
            run(2, tmp_path, model, None, (rank, int(calls) + 1), False)
        except RankError:
            kills += 1
    assert kills >= 5, "the moments must lie in the training"
    assert_resumes(tmp_path, model, undisturbed)


@pytest.mark.parametrize("setting", ["nowhere:1", "before_shard", "before_shard:x", "a:1@b"])
def test_a_wrong_fault_is_an_error(monkeypatch, setting):
    monkeypatch.setenv(faults.VARIABLE, setting)
    with pytest.raises(ValueError, match="must be point:count"):
        faults.reach("before_shard", 0)


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    for point in faults.POINTS:
        faults.reach(point, 0)

