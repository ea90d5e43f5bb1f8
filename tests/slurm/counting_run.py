"""A training run reduced to what Slurm sees of it: ranks, steps, signals, a checkpoint, exit codes.

It keeps the trainer's contract: SIGUSR1 or SIGTERM finishes the step, saves and exits 75; a start
resumes from the checkpoint; the end exits 0. `steps.txt` records every step that was done.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import Config, ConfigError
from megatron_rl.rendezvous import adopt_slurm_variables


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    try:
        config = Config.load(options.config, options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    stop = torch.zeros(1)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.fill_(1))
    adopt_slurm_variables(os.environ)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    checkpoint = folder / "checkpoint.txt"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"rank {rank} of {world} starts after step {step}", flush=True)
    while step < config.training.steps and not _enough(folder):
        step += 1
        _maybe_fail(rank, step, folder)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
        time.sleep(0.2)
        if rank == 0:
            with (folder / "steps.txt").open("a") as file:
                file.write(f"{step}\n")
        asked = stop.clone()
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if rank == 0 and (asked.item() or step % 5 == 0 or step == config.training.steps):
            checkpoint.write_text(str(step))
        if asked.item():
            dist.barrier()
            print(f"rank {rank} stops after step {step}", flush=True)
            return 75
    dist.barrier()
    return 0


def _enough(folder: Path) -> bool:
    """A test asks for the end with a file; the ranks agree on whether they saw it."""
    seen = torch.tensor([float((folder / "enough").exists())])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen.item())


def _maybe_fail(rank: int, step: int, folder: Path) -> None:
    """FAIL_AT=rank:step raises there, once if FAIL_ONCE is set."""
    where, marker = os.environ.get("FAIL_AT", ""), folder / "failed"
    if where != f"{rank}:{step}" or (os.environ.get("FAIL_ONCE") and marker.exists()):
        return
    marker.touch()
    raise RuntimeError(f"planned failure of rank {rank} at step {step}")


if __name__ == "__main__":
    sys.exit(main())
