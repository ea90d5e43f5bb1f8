"""2,000 PPO steps lose no memory, open file or thread. Layer: the real train_ppo.py, two ranks."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import psutil
import pytest

from tests.operate.train_processes import Attempt
from tests.trainer import run_case

STEPS = int(os.environ.get("MEGATRON_RL_ENDURANCE_STEPS", "2000"))
WARM_UP = 200


def observe(processes: list[psutil.Process]) -> list[tuple[int, int, int]]:
    """(resident bytes, open files, threads) of each rank."""
    return [(p.memory_info().rss, p.num_fds(), p.num_threads()) for p in processes]


@pytest.mark.ranks
@pytest.mark.slow
def test_nothing_grows_in_two_thousand_steps(tiny_model_dir, tmp_path):
    values = run_case.settings(
        str(tiny_model_dir), tmp_path, training__steps=STEPS, parallel__tp=2,
        rollout__batch_size=2, rollout__n=1, rollout__max_new_tokens=2,
        training__mini_batch_size=2, training__epochs=1, evaluation__at_start=False,
        evaluation__at_end=False, checkpoint__save_interval=100,
    )  # fmt: skip
    attempt = Attempt(tmp_path, values, 2)
    ranks = [psutil.Process(process.pid) for process in attempt.processes]
    metrics = tmp_path / "run/metrics.jsonl"
    seen: list[tuple[int, list[tuple[int, int, int]]]] = []
    deadline = time.monotonic() + 300 + 5 * STEPS  # also on a busy machine
    while all(process.is_alive() for process in attempt.processes):
        assert time.monotonic() < deadline, attempt.said
        try:
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            seen.append((step, observe(ranks)))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.5)
    assert attempt.wait() == [0, 0], attempt.said
    report(seen, tmp_path)
    during = [(step, both) for step, both in seen if WARM_UP <= step < STEPS]
    assert len(during) > 20
    third = len(during) // 3
    for rank in range(2):
        first, last = during[:third], during[-third:]
        for what, allowed in ((0, 1.01), (1, 1.0), (2, 1.0)):
            early, late = (
                statistics.median(both[rank][what] for _, both in part) for part in (first, last)
            )
            assert late <= early * allowed, f"rank {rank}, {what}: {early} → {late}"


def report(seen: list, folder: Path) -> None:
    """For LOG.md: shown with -s."""
    for step, both in seen[:: max(len(seen) // 20, 1)]:
        shown = "; ".join(f"{rss / 2**20:.1f} MiB {fds} files {n} threads" for rss, fds, n in both)
        print(f"step {step}: {shown}")
