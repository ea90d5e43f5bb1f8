"""Layer: one rank, slow. Thousands of requests come and go; memory and blocks are as before."""

from __future__ import annotations

import gc
import random

import psutil
import pytest

from tests.generation.test_session import engine, params

REQUESTS, WARM = 2000, 400


def soak(rank, world, folder):
    """(resident bytes, open files, threads) once warm and at the end, responses, free blocks."""
    block = 2 * 4 * 8 * 2 * 16 * 4
    made = engine(folder, world, settings=dict(
        max_running=24, burst=4, steps_ahead=1, block_size=8, kv_cache_bytes=40 * block,
    ))  # fmt: skip
    draw, me, marks, done = random.Random(1), psutil.Process(), [], []
    prefix = [draw.randrange(3, 200) for _ in range(30)]
    with made.open() as session:
        sent = 0
        while sent < REQUESTS or not session.finished:
            while sent < REQUESTS and session.room > 0:
                prompt = prefix[: draw.randrange(31)] + [draw.randrange(3, 200)]
                made.request(session, sent, prompt, params(max_new_tokens=draw.randint(1, 24)))
                sent += 1
                if draw.random() < 0.02:
                    session.abort(sent - draw.randint(1, 10))
            done += session.step()[1]
            if len(marks) == 0 and len(done) >= WARM:
                gc.collect()
                marks.append((me.memory_info().rss, me.num_fds(), me.num_threads()))
        counts = session.counts
        free = session.blocks.count - session.blocks.free
    gc.collect()
    marks.append((me.memory_info().rss, me.num_fds(), me.num_threads()))
    return marks, [(r.request, r.finish_reason) for r in done], free, counts


@pytest.mark.ranks
@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(ranks, tiny_model_dir):
    (warm, end), done, used, counts = ranks(1, soak, str(tiny_model_dir))[0]
    assert sorted(number for number, _ in done) == list(range(REQUESTS)), "each is answered once"
    assert {reason for _, reason in done} == {"length", "abort"}
    assert counts.preemptions > 0 and counts.shared_blocks > 0, "the cache was tight and shared"
    assert used == 0
    assert end[0] < 1.02 * warm[0], f"resident memory {warm[0] / 1e6:.0f} → {end[0] / 1e6:.0f} MB"
    assert end[1:] == warm[1:], "files and threads"
