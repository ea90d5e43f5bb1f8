"""Layer: real processes. One does the work, the others wait; old notes are not believed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from megatron_rl.config import ConfigError
from megatron_rl.once_per_node import NodeRank, once_per_node

print("started", flush=True)
sys.stdin.readline()

def work():
    with open(sys.argv[1], "a") as file:
        file.write("x")
    if sys.argv[2] == "refuse":
        raise ConfigError("no such repository", setting="data.train")
    if sys.argv[2] == "die":
        os._exit(9)
    return f"result {sys.argv[2]}"

try:
    print(once_per_node("fetch it", work, NodeRank.read()), flush=True)
except (ConfigError, RuntimeError) as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.readline()
"""


class Rank:
    """A process that waits for a line before the work, and for another before its end."""

    def __init__(self, folder: Path, rank: int, outcome: str) -> None:
        environment = os.environ | {
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
            "TMPDIR": str(folder),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder / "count"), outcome], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.line() == "started"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.communicate("\n", timeout=20)


@pytest.fixture
def start(tmp_path):
    started: list[Rank] = []

    def make(rank: int, outcome: str = "1") -> Rank:
        started.append(Rank(tmp_path, rank, outcome))
        return started[-1]

    yield make
    for rank in started:
        if rank.process.poll() is None:
            rank.process.kill()
        rank.process.communicate()


def test_one_works_and_the_other_waits_for_it(start, tmp_path) -> None:
    waiting, working = start(1), start(0)
    waiting.go()
    time.sleep(0.3)
    assert not (tmp_path / "count").exists(), "rank 1 did the work itself"
    working.go()
    assert working.line() == waiting.line() == "result 1"
    assert (tmp_path / "count").read_text() == "x"
    (folder,) = tmp_path.glob("megatron-rl-*")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_note_of_an_earlier_run_is_not_believed(start, tmp_path) -> None:
    earlier = start(0, "old")
    earlier.go()
    assert earlier.line() == "result old"
    earlier.end()
    waiting = start(1)
    waiting.go()
    working = start(0, "new")
    working.go()
    assert waiting.line() == working.line() == "result new"


def test_a_refusal_reaches_everybody(start) -> None:
    waiting, working = start(1), start(0, "refuse")
    for rank in (waiting, working):
        rank.go()
    assert waiting.line() == working.line() == "ConfigError no such repository"


def test_the_death_of_the_one_that_works_is_noticed(start) -> None:
    waiting, working = start(1), start(0, "die")
    time.sleep(1.1)  # starts are known to the second
    for rank in (waiting, working):
        rank.go()
    assert waiting.line() == "RuntimeError local rank 0 ended while it was to fetch it"


def test_a_folder_that_others_can_write_to_is_refused(start, tmp_path) -> None:
    folder = tmp_path / f"megatron-rl-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    working = start(0)
    working.go()
    assert working.line().startswith("ConfigError") and not (tmp_path / "count").exists()
