"""A whole transition over NCCL: `torchrun --nproc_per_node=N -m megatron_rl.resharding.bench`.

Training tp=N gathers to generation tp=1 with random weights of a real model's shapes. Beside the
two forms of this package: one all-gather and one `torch.cat` per tensor, the way weights are
usually synchronised, and with `--peer` Megatron-Core's own resharding over its NCCL copy service.
Every result is compared bit by bit with shards made again from the other ranks' seeds. The floor is
the bytes received over the rate of one large all-gather, measured first; "peak extra" is the device
memory above the training weights, staging and temporaries included.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_rl.resharding.compare import Peer
from megatron_rl.resharding.decoder import LLAMA3_8B, QWEN25_05B, decoder_specs
from megatron_rl.resharding.execute import Resharder, new_exchange_group
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import Plan, make_plan
from megatron_rl.resharding.segments import SegmentedResharder

MODELS = {"llama-8b": LLAMA3_8B, "qwen2.5-0.5b": QWEN25_05B}


def random_shards(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """A rank's training shards; replicated tensors are equal on all ranks."""
    shards = {}
    for index, spec in enumerate(plan.specs):
        seed = index if spec.cut.kind == "replicated" else 1000 * (rank + 1) + index
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = plan.training_shape(rank, index)
        shards[spec.name] = torch.randn(
            shape, dtype=torch.bfloat16, device="cuda", generator=generator
        )
    return shards


def join(kind: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """Training shards in rank order to the whole tensor, by `torch.cat`."""
    if kind == "replicated":
        return shards[0]
    if kind == "gate_up":
        halves = [s.chunk(2) for s in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards, dim=int(kind == "columns"))


def per_tensor(plan: Plan, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One all-gather and one concatenation for every tensor."""
    world, found = dist.get_world_size(), {}
    for spec in plan.specs:
        shard = weights[spec.name]
        if spec.cut.kind == "replicated":
            found[spec.name] = shard
            continue
        flat = torch.empty(world, *shard.shape, dtype=shard.dtype, device=shard.device)
        dist.all_gather_into_tensor(flat, shard)
        found[spec.name] = join(spec.cut.kind, list(flat))
    return found


def median_ms(call: Callable[[], object], repeats: int = 7) -> float:
    """Median device time of a collective call, after two to warm up."""
    times = []
    for step in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if step >= 2:
            times.append(start.elapsed_time(stop))
    slowest = torch.tensor(sorted(times)[len(times) // 2], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def link_bandwidth(nbytes: int = 2**31) -> float:
    """Bytes per second that a rank receives in one large all-gather."""
    world = dist.get_world_size()
    own = torch.randint(0, 255, (nbytes // world,), dtype=torch.uint8, device="cuda")
    everyone = torch.empty(own.numel() * world, dtype=torch.uint8, device="cuda")
    milliseconds = median_ms(lambda: dist.all_gather_into_tensor(everyone, own))
    return (everyone.nbytes - own.nbytes) / (milliseconds * 1e-3)


def bench_model(name: str, rank: int, world: int, peer: bool, link: float) -> None:
    train = ShardGrid(tp=world)
    # No tensor may be cut by a bucket where shards are used as they arrive.
    plans = {
        size: make_plan(decoder_specs(MODELS[name]), train, generation_grid(train, tp=1),
                        bucket_bytes=size)
        for size in (64 * 2**20, 256 * 2**20, 2**31)
    }  # fmt: skip
    plan = plans[2**31]
    group = new_exchange_group(plan)
    weights = random_shards(plan, rank)
    others = [weights if r == rank else random_shards(plan, r) for r in range(world)]
    received = plan.received_bytes(rank)

    def show(title: str, make: Callable[[], Callable[[], dict]]) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call = make()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        for spec in plan.specs:
            value = result[spec.name]
            value = join(spec.cut.kind, list(value)) if isinstance(value, tuple) else value
            want = join(spec.cut.kind, [o[spec.name] for o in others])
            assert torch.equal(value, want), f"{title}: {spec.name} differs"
        del result, value, want
        ms = median_ms(call)
        if rank == 0:
            print(f"  {title:34s}{ms:9.2f} {received / ms / 1e6:8.1f} "
                  f"{received / link / ms * 1e3:9.1%} {peak / 1e9:9.2f}")  # fmt: skip

    if rank == 0:
        print(f"{name}, tp {world} -> 1: {received / 1e9:.2f} GB received, "
              f"floor {received / link * 1e3:.2f} ms")  # fmt: skip
        print(f"  {'':34s}{'ms':>9s} {'GB/s':>8s} {'of floor':>9s} {'peak extra GB':>13s}")
    for size, sized in plans.items():
        title = f"tensors, {sized.num_buckets} buckets of {size // 2**20} MiB"
        show(title, lambda p=sized: Resharder(p, rank, weights, group).gather)
    show("segments", lambda: SegmentedResharder(plan, rank, weights, group).gather)
    show("all-gather and cat per tensor", lambda: lambda: per_tensor(plan, weights))
    if peer:
        from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

        service = NCCLCopyService()
        show("Megatron-Core over NCCL", lambda: Peer(plan, rank, weights, service).gather)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), nargs="*", default=sorted(MODELS))
    parser.add_argument("--peer", action="store_true", help="time Megatron-Core's resharding too")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    link = link_bandwidth()
    if dist.get_rank() == 0:
        print(f"all-gather {link / 1e9:.0f} GB/s received per rank, {torch.cuda.get_device_name()}")
    for name in args.model:
        bench_model(name, dist.get_rank(), dist.get_world_size(), args.peer, link)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
