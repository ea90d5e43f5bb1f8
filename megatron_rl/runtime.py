"""Where a run lives: device, process group, seeds, logs, stop signals, orderly shutdown."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl import cuda_on_cpu, exit_codes
from megatron_rl.config import Config, ConfigError
from megatron_rl.rank_log import RankLog
from megatron_rl.rendezvous import adopt_slurm_variables
from megatron_rl.stopping import StoppedBySignal, StopSignals
from megatron_rl.versions import UnsupportedVersionError
from megatron_rl.watchdog import Watchdog

_A_WEEK = timedelta(days=7)

log = logging.getLogger("megatron_rl")

# cuBLAS sums in a fixed order only with a workspace of its own; Transformer Engine picks attention
# kernels whose backward pass has no atomic additions.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",)
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """This process's place among the ranks, from torchrun's or Slurm's variables."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def read(cls) -> Environment:
        """torchrun's variables, or Slurm's in their place, else one rank."""
        env = os.environ
        adopt_slurm_variables(env)
        if "RANK" not in env:
            return cls(rank=0, world_size=1, local_rank=0)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        try:
            rank, world, local = (int(env[name]) for name in names)
            local_world = int(env.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the environment names a rank but not all of {', '.join(names)} are whole numbers "
                f"({error}); start with torchrun, srun, or none of these variables"
            ) from error
        if not (0 <= rank < world and 0 <= local < local_world <= world):
            raise ConfigError(
                f"the environment has {names[0]}={rank}, {names[1]}={world}, {names[2]}={local} "
                f"and {local_world} ranks on this node, which contradict each other; start with "
                "torchrun, srun, or none of these variables"
            )
        port = env.get("MASTER_PORT", "1")
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(
                f"the environment has MASTER_PORT={port!r}, which is no port (1 … 65535); correct "
                "it or start with torchrun"
            )
        return cls(rank=rank, world_size=world, local_rank=local)


class Runtime:
    """The process group and what has to be undone at the end.

    Attributes:
        place: the ranks of the process group: all, or those that do the same as this one.
        store: the rendezvous' store, which all ranks share; None: somebody else made the group.
    """

    def __init__(self, config: Config, env: Environment) -> None:
        self.config, self.env = config, env
        self.place = config.place_of(env.rank, env.world_size)
        self.store: dist.Store | None = None
        self.device = _choose_device(config, env)
        self._owns_group = False
        self.stop = StopSignals(config.runtime.grace_time)
        self.watchdog: Watchdog | None = None
        self.rank_log = RankLog(env.rank)

    def start(self, *, inputs_may_be_late: bool = False) -> None:
        """Joins the process group, seeds everything, opens this rank's log, minds the signals.

        Args:
            inputs_may_be_late: other nodes may still be fetching their inputs, so
                `runtime.init_timeout` starts only when every rank has them; equal on all ranks.
        """
        self.stop.install()
        cuda_on_cpu.enable()
        if self.config.training.deterministic:
            choose_deterministic_kernels()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.rank_log.open(Path(self.config.run_dir) / "logs")
        with self.failures_told():
            self._meet_the_others(inputs_may_be_late)
        random.seed(self.config.seed)
        torch.manual_seed(self.config.seed)

    def _meet_the_others(self, inputs_may_be_late: bool) -> None:
        if dist.is_initialized() and not self.place.alone:
            raise ConfigError(
                f"ranks are set apart for {', '.join(self.config.ranks_apart)}, but this process "
                "is in a process group already: leave that to Trainer and serve_frozen_model"
            )
        if not dist.is_initialized():
            self._join(inputs_may_be_late)
            self._owns_group = True
        self._start_watchdog()
        from megatron_rl.parallel import control_group, set_group_timeout

        set_group_timeout(self.config.runtime.collective_timeout)
        self.stop.everyone = control_group([list(range(self.place.size))])

    def _join(self, inputs_may_be_late: bool) -> None:
        env = self.env
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if env.world_size > 1 and "MASTER_PORT" not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {env.world_size}, but MASTER_PORT is not set; start with torchrun, "
                "or set MASTER_ADDR and MASTER_PORT"
            )
        timeout = timedelta(seconds=self.config.runtime.init_timeout)
        if env.world_size == 1 and "MASTER_PORT" not in os.environ:
            store = dist.HashStore()
        else:
            store = _meet(env, _A_WEEK if inputs_may_be_late else timeout)
        store.set_timeout(timeout)
        self.store = dist.PrefixStore("run", store)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo", timeout=timeout,
            rank=self.place.index, world_size=self.place.size,
            store=dist.PrefixStore(self.place.name, self.store),
        )  # fmt: skip

    def _start_watchdog(self) -> None:
        """In a process group that somebody else made, only the grace time is minded."""
        settings = self.config.runtime
        self.watchdog = Watchdog(
            rank=self.env.rank, world_size=self.env.world_size,
            store=self.store if self._owns_group else None,
            stop=self.stop, silence=settings.heartbeat_timeout,
            collective_timeout=settings.collective_timeout,
            folder=Path(self.config.run_dir) / "logs",
        )  # fmt: skip
        self.watchdog.start()

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """An error inside is told to the other ranks, which would wait for this one, and raised."""
        try:
            yield
        except StoppedBySignal:
            raise
        except BaseException as error:
            self.rank_log.write_failure(error)
            bad_input = isinstance(error, (ConfigError, UnsupportedVersionError))
            if self.watchdog is not None:
                self.watchdog.fail(error, exit_codes.BAD_INPUT if bad_input else exit_codes.CRASH)
            raise

    def close(self) -> None:
        """Leaves the process group; safe to call twice."""
        if self.watchdog is not None:
            self.watchdog.stop()
        if not self.stop.requested:  # else one more signal must not change how the process ends
            self.stop.restore()
        if self._owns_group and dist.is_initialized():
            from megatron_rl.parallel import forget_groups

            forget_groups()
            dist.destroy_process_group()
            self._owns_group = False
        if self.config.training.deterministic:
            torch.use_deterministic_algorithms(False)
        self.rank_log.close()


def choose_deterministic_kernels() -> None:
    """Restricts torch, cuBLAS and Transformer Engine to kernels that give the same bits every time.

    The libraries read their variables when they are first used, so this comes before any tensor is
    on a GPU.

    Raises:
        ConfigError: if the environment asks for the opposite.
    """
    for name, allowed in _DETERMINISTIC.items():
        value = os.environ.setdefault(name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"training.deterministic is true, but the environment sets {name}={value}: it must "
                f"be {' or '.join(allowed)}; unset it or set training.deterministic=false",
                setting="training.deterministic",
            )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _choose_device(config: Config, env: Environment) -> torch.device:
    """The GPU of this rank, or the CPU.

    Raises:
        ConfigError: if GPUs are asked for and there are too few.
    """
    wanted = config.runtime.device
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", env.world_size))
    count = 0 if wanted == "cpu" else (torch.cuda.device_count() if _has_gpu() else 0)
    index = gpu_of(env.local_rank, local_ranks, count, by_slurm="SLURM_STEP_ID" in os.environ)
    if wanted == "cuda" and index is None:
        raise ConfigError(
            f"runtime.device is 'cuda', but this machine has {count} GPUs for {local_ranks} ranks; "
            "start fewer ranks or set runtime.device=cpu",
            setting="runtime.device",
        )
    if index is not None:
        return torch.device("cuda", index)
    if config.model.attention_backend == "varlen":
        raise ConfigError(
            "model.attention_backend is 'varlen', but this run is on the CPU, where torch has no "
            "packed attention; set model.attention_backend=torch",
            setting="model.attention_backend",
        )
    return torch.device("cpu")


def gpu_of(local_rank: int, local_ranks: int, count: int, *, by_slurm: bool) -> int | None:
    """Which of `count` visible GPUs is a rank's; None where there is not one for every rank.

    A job step with --gpus-per-task=1 shows each task its own GPU alone.
    """
    if count >= local_ranks:
        return local_rank
    return 0 if by_slurm and count == 1 else None


def _meet(env: Environment, patience: timedelta) -> dist.Store:
    """The ranks' key-value store, once all ranks are at this point.

    Raises:
        torch.distributed.DistStoreError: a rank is not there after `patience`.
    """
    store, _, _ = next(
        dist.rendezvous("env://", rank=env.rank, world_size=env.world_size, timeout=patience)
    )
    store.set(f"ready/{env.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(env.world_size)], patience)
    return store


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def quiet_expected_warnings() -> None:
    """Hides what Megatron says about the absence of Apex and Transformer Engine, which is a choice
    here, and torch's note on reading `.grad` of the optimizer's shards, which Megatron means."""
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def run_guarded(main: Callable[[], int], env: Environment) -> int:
    """Runs `main` and turns how it ends into an exit code.

    Bad input is one line on rank 0 and code 2. Any other exception is this rank's traceback and an
    immediate exit: the launcher then ends the other ranks, which may be inside a collective.
    """
    try:
        return main()
    except (ConfigError, UnsupportedVersionError) as error:
        if env.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2.0)  # the launcher ends all ranks with the first: let rank 0 speak
        return exit_codes.BAD_INPUT
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BaseException:  # noqa: BLE001 - the traceback must be shown whatever it is
        text = f"rank {env.rank} failed:\n{traceback.format_exc()}"
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(exit_codes.CRASH)
