"""Layer: pure, and one child process. Two runs never write into one folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.checkpoint.ownership import (
    RECORD,
    Claim,
    read_owner,
    this_process,
)
from megatron_rl.processes import start_time

HOLD = """
import sys
from pathlib import Path
from megatron_rl.checkpoint.ownership import Claim
claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def leave_record(root, **changes):
    (root / RECORD).write_text(json.dumps(asdict(replace(this_process(), **changes))))


def test_a_run_that_lives_keeps_its_folder_and_a_killed_one_does_not(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline().strip() == b"held"
    with pytest.raises(CheckpointError, match=f"process {child.pid} on .*another|another.*process"):
        Claim(tmp_path)
    child.kill()  # not waited for: a zombie does not hold a folder either
    while start_time(child.pid) is not None:
        time.sleep(0.01)
    claim = Claim(tmp_path)
    assert read_owner(tmp_path).run == claim.me.run
    child.wait()
    claim.release()
    assert read_owner(tmp_path) is None


def test_a_silent_run_on_another_machine_is_taken_over(tmp_path):
    leave_record(tmp_path, machine="elsewhere", host="node7", run="old")
    claim = Claim(tmp_path, beat_seconds=0.01)
    assert read_owner(tmp_path).run == claim.me.run
    claim.release()


def test_a_run_on_another_machine_that_renews_its_record_is_not(tmp_path):
    other = Claim(tmp_path, beat_seconds=0.01)
    other.me = replace(other.me, machine="elsewhere", host="node7", job="4711")
    other._write()
    with pytest.raises(CheckpointError, match="node7, job 4711"):
        Claim(tmp_path, beat_seconds=0.5)
    other.release()


def test_a_requeued_job_takes_over_at_once(tmp_path, monkeypatch):
    leave_record(tmp_path, machine="elsewhere", job="12", restart=0)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr("time.sleep", lambda s: pytest.fail("it need not wait"))
    Claim(tmp_path).release()


def test_the_run_that_lost_its_folder_notices(tmp_path):
    first = Claim(tmp_path)
    first.check()
    second = Claim(tmp_path)  # the same process may start over
    with pytest.raises(CheckpointError, match="taken over"):
        first.check()
    first.release()
    assert read_owner(tmp_path).run == second.me.run, "only the holder removes the record"
    second.release()


def test_a_record_cut_short_is_no_owner(tmp_path):
    (tmp_path / RECORD).write_text('{"run": ')
    Claim(tmp_path).release()
