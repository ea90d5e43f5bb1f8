"""Layer: pure. The terminal shows phases and the end; a log file gets one plain line per step."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import time

import pytest

from megatron_rl.monitor.console import Console, duration, step_line

METRICS = {
    "reward/mean": 0.51234, "kl/ref": 0.01, "perf/step_seconds": 3.04, "perf/eta_seconds": 5400.0,
    "perf/tokens_per_second": 1234.5,
}  # fmt: skip


def test_line_of_a_step_has_the_numbers_and_the_end():
    now = time.mktime((2026, 3, 1, 10, 0, 0, 0, 0, -1))
    line = step_line(7, 90, METRICS, now)
    assert line.startswith("step 7/90 · reward 0.512 · kl 0.0100 · s 3.0 · tok/s 1234")
    assert line.endswith("1.5 h left, ends 11:30") and "entropy" not in line
    late = step_line(7, 90, METRICS | {"perf/eta_seconds": 30 * 86400.0}, now)
    assert late.endswith("ends 2026-03-31")


@pytest.mark.parametrize(("seconds", "text"), [(9, "9 s"), (90, "1.5 min"), (7200, "2.0 h")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_log_file_gets_one_plain_line_per_step():
    file = io.StringIO()
    console = Console(3, 0, file)
    for step in (1, 2, 3):
        for phase in ("generation", "update_actor"):
            console.phase(phase)
        console.step(step, METRICS)
    console.note("a note with [brackets]")
    console.close()
    lines = file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines[:3]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[3:] == ["a note with [brackets]"]
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()


def test_terminal_shows_the_phase_and_the_progress():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(4, 2, terminal)
        console.phase("update_actor")
        console.progress.refresh()
        console.step(3, METRICS)
        console.close()
    shown = _rest_of(ours)
    assert "update actor" in shown and "2/4" in shown and "3/4" in shown and "step 3/4" in shown


def _rest_of(terminal: int) -> str:
    """What the other end wrote before it closed; one read may return only a part of it."""
    parts = []
    with os.fdopen(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while part := stream.read(65536):  # Linux reports the closed end as an input/output error
            parts.append(part)
    return b"".join(parts).decode()
