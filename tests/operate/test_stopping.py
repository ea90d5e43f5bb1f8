"""Signals: the note, what they interrupt, and how ranks agree. Layer: pure, and two gloo ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest

from megatron_rl import stopping
from megatron_rl.stopping import StopNow, StopSignals


@pytest.fixture
def stop():
    made = StopSignals(30.0)
    made.install()
    yield made
    made.restore()


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_starts_the_clock_and_a_second_one_changes_nothing(stop, number):
    assert not stop.requested and stop.seconds_left == float("inf")
    os.kill(os.getpid(), number)
    assert stop.requested
    first = stop.seconds_left
    assert 0 < first <= 30
    time.sleep(0.01)
    os.kill(os.getpid(), number)
    assert stop.seconds_left < first


def test_restore_gives_the_signals_back():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    stop = StopSignals(1.0)
    stop.install()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] != before
    stop.restore()
    stop.restore()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopSignals(1.0).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def careless(seconds: float) -> str:
    """A reward function that survives its own errors."""
    try:
        time.sleep(seconds)
    except Exception:  # noqa: BLE001
        return "survived"
    return "slept"


@pytest.mark.parametrize("by", ["signal", "pass_on"])
def test_user_code_is_left_while_it_sleeps(stop, by):
    act = stop.pass_on if by == "pass_on" else lambda: os.kill(os.getpid(), signal.SIGTERM)
    timer = threading.Timer(0.05, act)
    timer.start()
    start = time.monotonic()
    with pytest.raises(StopNow), stop.interruptible():
        careless(60.0)
    assert time.monotonic() - start < 30
    timer.join()


def test_user_code_is_not_entered_after_a_signal_and_the_code_after_it_is_not_interrupted(stop):
    with stop.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGUSR1)  # outside: only a note
    with pytest.raises(StopNow), stop.interruptible():
        raise AssertionError("entered")


def test_one_rank_looks_at_every_sixteenth_engine_step(stop):
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(stopping.ENGINE_STEPS_BETWEEN_LOOKS - 1):
        stop.look(None)
    with pytest.raises(StopNow):
        stop.look(None)


def test_too_short_a_grace_time_is_said_once(caplog):
    stop = StopSignals(0.03)
    caplog.set_level(logging.WARNING)
    logging.getLogger("megatron_rl").propagate = True
    with stop.finishes("a save"):
        pass
    assert not caplog.records
    for _ in range(2):
        with stop.finishes("an update"):
            time.sleep(0.05)
    (record,) = caplog.records
    assert "runtime.grace_time is 0.03 s" in record.getMessage()
    assert "an update took" in record.getMessage() and "at least 1" in record.getMessage()


def agree(rank, world, signalled):
    """What two ranks make of a signal on one: a section that the other one completes."""
    import torch.distributed as dist

    from megatron_rl.parallel import control_group

    stop = StopSignals(30.0)
    stop.install()
    stop.everyone = control_group([[0, 1]])
    seen = []
    try:
        with stop.section():
            seen.append("quiet")
        if rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        with stop.section():
            with stop.interruptible():  # the signalled rank is out here already
                seen.append("inside")
        seen.append("after")
    except StopNow:
        seen.append("stopped")
    finally:
        stop.restore()
    dist.barrier()
    return seen


@pytest.mark.ranks
def test_all_ranks_leave_a_section_that_one_of_them_left(ranks):
    results = ranks(2, agree, 1)
    assert results == [["quiet", "inside", "stopped"], ["quiet", "stopped"]]
