"""Time of one gradient reduction on a real link: fp32, bf16 and int8 on the same ranks.

    torchrun --nproc_per_node 2 benchmarks/int8_link.py --values 67108864

runs on gloo without GPUs and on NCCL with them. Rank 0 prints one JSON object: seconds per
reduction (median over ``--repeats``, the slowest rank counts), payload bytes sent per value and
rank. tests/int8/test_slow_link.py runs it between network
namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.comm.two_shot import CHUNK_VALUES, Rules, Segment, TwoShot
from megatron_rl.kernels import int8_allreduce as int8


def reductions(
    start: torch.Tensor, rules: Rules
) -> dict[str, tuple[torch.Tensor, Callable[[], None]]]:
    """Name → (buffer, function that reduces the buffer in place)."""
    ranks = rules.group.size()
    full, half, ours = start.clone(), start.to(torch.bfloat16), start.clone()

    def two_shot() -> None:
        shots = TwoShot([Segment(ours.view(ranks, -1))], rules)
        shots.launch()
        shots.finish()

    return {
        "fp32": (full, lambda: dist.all_reduce(full)),
        "bf16": (half, lambda: dist.all_reduce(half)),
        "int8": (ours, two_shot),
    }


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 26)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=CHUNK_VALUES)
    parser.add_argument("--kernels", help="cuda, triton, cpp or torch; default: the fastest here")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    device = torch.device(device)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rules = Rules(
        dist.group.WORLD, int8.select_backend(device, options.kernels), 256, gather=True,
        chunk=options.values if cuda else options.chunk,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(options.values, generator=generator).to(device)
    small = start[: 512 * ranks]
    for buffer, run in reductions(small, rules).values():
        run()
        exact = small.double()
        dist.all_reduce(exact)
        assert (buffer.double() - exact).norm() < 0.02 * exact.norm()
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, (_, run) in reductions(start, rules).items():
            seconds.setdefault(name, []).append(timed(run, device))
    share = 2 * (ranks - 1) / ranks
    if rank == 0:
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        print(json.dumps({
            "values": options.values, "ranks": ranks, "kernels": rules.backend.name,
            "seconds": medians, "all_seconds": seconds,
            "bytes_per_value": {"fp32": 4 * share, "bf16": 2 * share,
                                "int8": TwoShot([Segment(start.view(ranks, -1))], rules).bytes_sent
                                / options.values},
            "speedup": {name: medians[name] / medians["int8"] for name in ("fp32", "bf16")},
        }), flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
