"""The real `train_ppo.py` on several ranks, forked from a process that has Megatron loaded.

A `Deed` is done by one rank when it enters a phase for the n-th time: the process signals, freezes
or kills itself there, exactly.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.rank_pool import PRELOAD

_context = multiprocessing.get_context("forkserver")
KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
HANG = "hang"


@dataclass(frozen=True)
class Deed:
    """`signals` that `rank` sends itself, one after the other, when it enters `phase`."""

    rank: int
    phase: str
    signals: tuple[int | str, ...]
    visit: int = 1

    def commit(self) -> None:
        for what in self.signals:
            if what == HANG:
                time.sleep(10_000)
            os.kill(os.getpid(), what)


def install(deed: Deed, rank: int) -> None:
    """Lets the phase timer of this process commit the deed."""
    from megatron_rl.monitor import phases

    entered = 0

    class Timer(phases.PhaseTimer):
        def phase(self, name):
            nonlocal entered
            entered += name == deed.phase
            inside = super().phase(name)
            if name != deed.phase or entered != deed.visit or rank != deed.rank:
                return inside
            return _After(inside, deed)

    import megatron_rl.trainer

    megatron_rl.trainer.PhaseTimer = Timer


class _After:
    """The phase, with the deed as the first thing in it."""

    def __init__(self, inside, deed: Deed) -> None:
        self.inside, self.deed = inside, deed

    def __enter__(self):
        self.inside.__enter__()
        self.deed.commit()

    def __exit__(self, *error):
        return self.inside.__exit__(*error)


def _train(rank: int, world: int, port: int, config: str, output: str, deed: Deed | None) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    handle = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import train_ppo

    if deed is not None:
        install(deed, rank)
    sys.argv = ["train_ppo.py", "--config", config]
    sys.exit(train_ppo.main())


class Attempt:
    """Started ranks of one run."""

    def __init__(self, folder: Path, values: dict, world: int, deed: Deed | None = None) -> None:
        _context.set_forkserver_preload([*PRELOAD, "megatron_rl.trainer"])
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(values))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.outputs = [folder / f"output-{time.time_ns()}-{rank}" for rank in range(world)]
        self.processes = [
            _context.Process(
                target=_train, args=(r, world, port, str(config), str(self.outputs[r]), deed)
            )
            for r in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, *ranks: int, seconds: float = 240) -> list[int]:
        """Exit codes of `ranks` (default: all); a killed process has minus its signal."""
        chosen = [self.processes[r] for r in ranks or range(len(self.processes))]
        deadline = time.monotonic() + seconds
        for process in chosen:
            process.join(timeout=max(deadline - time.monotonic(), 0.1))
        codes = [process.exitcode for process in chosen]
        if None in codes:
            self.end()
            raise AssertionError(f"still running after {seconds} s: {codes}\n{self.said}")
        return codes

    @property
    def said(self) -> str:
        """Everything that the ranks printed."""
        return "\n".join(
            f"--- rank {i}\n{path.read_text() if path.exists() else ''}"
            for i, path in enumerate(self.outputs)
        )

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


# What the machine does differently each time.
_MEASURED = ("perf/", "spread/", "throughput/", "mfu/", "memory/", "hardware/")


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without what is measured: it must be equal between equal runs."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(_MEASURED)} for line in lines
    ]
