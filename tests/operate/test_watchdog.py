"""The watchdog: what it makes of what it sees, and on real processes that die, freeze or hang.

Layer: pure, this process's own threads, and three real processes without a model.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl import exit_codes
from megatron_rl.stopping import StopSignals
from megatron_rl.watchdog import Watchdog, snapshot
from megatron_rl.watchdog.snapshot import Snapshot
from megatron_rl.watchdog.verdict import Verdict, culprits, report, summary
from tests.rank_pool import PRELOAD

_context = multiprocessing.get_context("forkserver")


def seen(rank: int, collective: str | None = None, place: str = "a.py:1 in f") -> Snapshot:
    return Snapshot(
        rank=rank, host="n1", pid=100 + rank, activity="step 3, scoring", still_seconds=9.0,
        collective=collective, place=place, pending=["gloo:broadcast number 7 of group 4"],
        stacks=f"thread MainThread of {rank}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("snapshots", "said"),
    [
        ([seen(0, "broadcast over ranks [0, 1]"), seen(1, place="r.py:4 in score")],
         ["rank 1 hangs in step 3, scoring at r.py:4 in score, in no collective; rank 0 waits"]),
        ([seen(0, "all_reduce over ranks [0, 1]")], ["rank 1 does not react"]),
        ([seen(0, "all_reduce over ranks [0, 1]"), seen(1, "barrier over ranks [0, 1]")],
         ["different places", "rank 0 stands in all_reduce", "rank 1 stands in barrier"]),
        ([seen(0, "barrier over ranks [0, 1]"), seen(1, "barrier over ranks [0, 1]")],
         ["all ranks stand in barrier"]),
        ([seen(0), seen(1)], ["all ranks stand in a.py:1 in f"]),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_named(snapshots, said):
    found = " ".join(culprits({s.rank: s for s in snapshots}, 2))
    for words in said:
        assert words in found, found


def test_the_report_has_a_line_and_the_stacks_of_every_rank():
    verdict = Verdict(kind="still", rank=0, text="no progress", exit_code=1, author=0)
    found = {0: seen(0, "broadcast over ranks [0, 1, 2]"), 2: seen(2)}
    short, whole = summary(verdict, found, 3), report(verdict, found, 3)
    for line in (
        "rank 0 on n1 (process 100): step 3, scoring, in broadcast over ranks [0, 1, 2], at a.py:1 "
        "in f, for 9 s, not complete: gloo:broadcast number 7 of group 4",
        "rank 1: no answer", "rank 2 on n1 (process 102): step 3, scoring, in no collective",
    ):  # fmt: skip
        assert line in short
    assert "MainThread" not in short
    assert "thread MainThread of 0" in whole and "thread MainThread of 2" in whole
    assert Snapshot.from_json(found[0].to_json()) == found[0]
    assert Verdict.from_json(verdict.to_json()) == verdict


def wait_here(started: threading.Event, release: threading.Event) -> None:
    started.set()
    release.wait()


def test_a_thread_that_does_not_move_looks_the_same_and_one_that_works_does_not():
    started, release = threading.Event(), threading.Event()
    still = threading.Thread(target=wait_here, args=(started, release), name="still one")
    working = threading.Thread(
        target=lambda: [sum(range(50)) for _ in iter(lambda: release.is_set(), True)]
    )
    still.start()
    working.start()
    started.wait()
    time.sleep(0.05)

    def looks(thread):
        marks = set()
        for _ in range(50):
            marks.add(snapshot.fingerprint(snapshot.sys._current_frames()[thread.ident]))
            time.sleep(0.002)
        return marks

    same, other = looks(still), looks(working)
    frame = snapshot.sys._current_frames()[still.ident]
    place, (stacks, collectives) = snapshot.find_place(frame), snapshot.all_stacks()
    release.set()
    still.join()
    working.join()
    assert len(same) == 1 and len(other) > 1
    assert place.startswith("operate/test_watchdog.py:") and place.endswith("in wait_here")
    assert "thread still one:" in stacks and "wait_here" in stacks
    assert "test_a_thread_that_does_not_move" not in stacks, "the looking thread itself"
    assert collectives == []


def test_a_main_thread_that_waits_for_work_does_not_hang(tmp_path):
    # It serves for as long as somebody holds it.
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dog = Watchdog(
        rank=0, world_size=2, store=store, stop=StopSignals(60.0), silence=5.0,
        collective_timeout=5.0, folder=tmp_path,
    )  # fmt: skip
    dog._passed = 2.0

    def looks():
        return [dog._own_main_thread() for _ in range(5)]

    with ThreadPoolExecutor(1) as pool:
        with dog.waits_for_work():
            assert pool.submit(looks).result() == [None] * 5
        found = pool.submit(looks).result()
    assert found[0] is None and found[-1].kind == "still"


def rank_main(rank: int, port: int, folder: str, task: str, settings: dict) -> None:
    """One of three ranks that reduce for ever; rank 1 does `task` after two rounds."""
    handle = os.open(f"{folder}/output-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 2)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    stop = StopSignals(settings.pop("grace_time", 60.0))
    stop.install()
    dog = Watchdog(
        rank=rank, world_size=3, store=dist.distributed_c10d._get_default_store(), stop=stop,
        folder=Path(folder), **settings,
    )  # fmt: skip
    dog.where = lambda: "step 5, scoring"
    dog.start()
    try:
        rounds(rank, task)
    except Exception as error:  # noqa: BLE001
        dog.fail(error, exit_codes.CRASH)
        os._exit(exit_codes.CRASH)
    if task == "late" and rank != 1:
        time.sleep(3)
    dog.stop()
    os._exit(exit_codes.DONE)


def rounds(rank: int, task: str) -> None:
    value = torch.ones(1)
    for step in range(10**9):
        if step == 2 and rank == 1:
            do_task(task)
        if step == 2 and task in ("leave", "late"):
            return
        # In tasks without it a lost connection would tell the others, as NCCL would not.
        if rank != 1 and step >= 2 and task in ("kill", "raise", "stop"):
            time.sleep(1000)
        dist.all_reduce(value)


def do_task(task: str) -> None:
    if task in ("kill", "kill_in_collective"):
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if task == "raise":
        raise ValueError("boom")
    if task == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    if task == "hang":
        time.sleep(1000)


class Ranks:
    """Three started processes."""

    def __init__(self, folder: Path, task: str, **settings) -> None:
        _context.set_forkserver_preload(PRELOAD)
        self.folder = folder
        settings = {"silence": 5.0, "collective_timeout": 300.0} | settings
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.processes = [
            _context.Process(target=rank_main, args=(r, port, str(folder), task, settings))
            for r in range(3)
        ]
        for process in self.processes:
            process.start()

    def codes(self, *ranks: int, seconds: float = 60) -> list[int]:
        """Exit codes; whoever is not asked about, or late, is killed."""
        deadline = time.monotonic() + seconds
        for rank in ranks:
            self.processes[rank].join(max(deadline - time.monotonic(), 0.1))
        found = [self.processes[rank].exitcode for rank in ranks]
        for process in self.processes:
            process.kill()
            process.join()
        return found

    def said(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("task", ["kill", "kill_in_collective", "freeze"])
def test_a_rank_that_is_gone_is_named_by_all(tmp_path, task):
    started = Ranks(tmp_path, task)
    assert started.codes(0, 2) == [exit_codes.LOST_RANK] * 2
    for rank in (0, 2):
        said = started.said(rank)
        assert "rank 1 does not react" in said, said
        assert ("no sign of life for 5 s" if task == "freeze" else "rank 1's process") in said
        assert "rank 2 on" in said and "step 5, scoring" in said
    (file,) = tmp_path.glob("watchdog-*.txt")
    assert "stacks of rank 0" in file.read_text() and "stacks of rank 2" in file.read_text()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_hang_is_reported_with_the_rank_the_phase_and_the_collective(tmp_path):
    started = Ranks(tmp_path, "hang", collective_timeout=6.0)
    assert started.codes(0, 1, 2) == [exit_codes.CRASH] * 3
    said = started.said(0)
    assert re.search(r"no progress for \d+ s in step 5, scoring", said), said
    assert "rank 1 hangs in step 5, scoring at operate/test_watchdog.py:" in said
    assert "in do_task, in no collective; ranks 0, 2 wait for it" in said
    assert "in all_reduce over ranks [0, 1, 2]" in said
    assert "not complete: gloo:all_reduce number" in said
    (file,) = tmp_path.glob("watchdog-*.txt")
    stacks = file.read_text()
    assert "do_task" in stacks and all(f"stacks of rank {rank}" in stacks for rank in range(3))


@pytest.mark.ranks
@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_others_with_its_words(tmp_path):
    started = Ranks(tmp_path, "raise")
    lost = exit_codes.LOST_RANK
    assert started.codes(0, 1, 2) == [lost, exit_codes.CRASH, lost]
    for rank in (0, 2):
        assert "rank 1 ended with ValueError: boom" in started.said(rank)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_signal_on_one_rank_reaches_all_and_the_grace_time_ends_them(tmp_path):
    """Nobody gets to a safe point here, so the end is the watchdog's, and asks for a requeue."""
    started = Ranks(tmp_path, "stop", grace_time=4.0)
    assert started.codes(0, 1, 2) == [exit_codes.REQUEUE] * 3
    assert "runtime.grace_time (4 s) is over and step 5, scoring has not ended" in started.said(1)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("task", ["leave", "late"])
def test_ranks_that_end_in_good_order_are_not_missed(tmp_path, task):
    assert Ranks(tmp_path, task).codes(0, 1, 2) == [exit_codes.DONE] * 3
