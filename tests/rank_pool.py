"""Real gloo ranks for tests: worker processes that stay warm between tests.

A pool of n processes is forked once from a server that has torch and Megatron loaded, joins one
process group, and then runs functions of test files. Any exception on a rank ends the pool (its
collectives can't be trusted any more); the next test gets a fresh one.

Between two tests a pool is stopped (SIGSTOP): every gloo group has a thread that wakes a hundred
times a second, and a few idle pools would take most of a core.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing.forkserver
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "tests.rank_preload"]
_context = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A rank raised; carries its traceback."""


def _load(path: str, modules: dict[str, Any]) -> Any:
    if path not in modules:
        name = "ranks_" + Path(path).stem
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]


def _seed(seed: int) -> None:
    """Every global generator; a fork keeps numpy's state and draws a new one for `random`."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _die_with_the_tests() -> None:
    """A stopped rank can't see that its pipe was closed: the kernel kills it with the fork server,
    which ends once nobody but the ranks' parent holds its pipe."""
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _work(rank: int, world_size: int, init_file: str, pipe: Any) -> None:
    _die_with_the_tests()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size
    )
    modules: dict[str, Any] = {}
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:
            return
        try:
            _seed(1234)
            result = getattr(_load(path, modules), name)(rank, world_size, *args)
            pipe.send((True, result))
        except BaseException:  # noqa: BLE001 - reported to the test, which fails with it
            pipe.send((False, traceback.format_exc()))
            return


class RankPool:
    """n gloo ranks that run one function at a time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        init_file = tempfile.mktemp(prefix="megatron_rl_ranks_")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_work, args=(rank, world_size, init_file, theirs), daemon=False
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable, *args: Any, timeout: float = 240.0) -> list[Any]:
        path = sys.modules[fn.__module__].__file__
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((path, fn.__name__, args))
        results, errors = [], []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(5.0 if errors else timeout):
                    errors.append(f"rank {rank} did not answer")
                    continue
                good, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                good, value = False, "the process died"
            (results if good else errors).append(value if good else f"rank {rank}:\n{value}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        self._signal(signal.SIGCONT)
        for process in self.processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()


class RankPools:
    """Pools by size, started on first use."""

    def __init__(self) -> None:
        _context.set_forkserver_preload(PRELOAD)
        self.pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int, fn: Callable, *args: Any, timeout: float = 240.0) -> list:
        pool = self.pools.get(world_size)
        if pool is None or not pool.alive:
            pool = self.pools[world_size] = RankPool(world_size)
        try:
            return pool.run(fn, *args, timeout=timeout)
        except RankError:
            self.pools.pop(world_size, None)
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
