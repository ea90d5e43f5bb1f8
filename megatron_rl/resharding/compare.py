"""Megatron-Core's own resharding beside ours, on gloo: same weights, bytes and time side by side.

    python -m megatron_rl.resharding.compare --ranks 8 --tp 8 --gen-tp 2

Both sides get the same training shards and the same generation grid (its groups at the strides of
`generation_grid`), and must end with bitwise equal generation shards. Megatron-Core plans on rank 0
with two all-gathers of Python objects and a broadcast, and sends one message per slice; the bytes
it receives are counted the same way as ours, at the tensors given to torch.distributed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_rl.resharding.decoder import DecoderSizes, decoder_specs
from megatron_rl.resharding.execute import Resharder, new_exchange_group
from megatron_rl.resharding.grid import ShardGrid, generation_grid
from megatron_rl.resharding.plan import Plan, make_plan
from megatron_rl.resharding.specs import TensorSpec


def _peer_groups(grid: ShardGrid, rank: int) -> SimpleNamespace:
    """The process groups Megatron-Core's planner reads, for one grid; every rank calls this."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for other in range(grid.world_size):
        at = grid.coordinate(other)
        replicas.setdefault((at.tp, at.pp), []).append(other)
    found = {}
    for name, groups in (
        ("tp", grid.tp_groups()),
        ("pp", grid.pp_groups()),
        ("dp", tuple(map(tuple, replicas.values()))),
    ):
        for ranks in groups:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                found[name] = group
    return SimpleNamespace(**found)


def peer_module(
    specs: tuple[TensorSpec, ...], shards: Mapping[str, torch.Tensor], groups: SimpleNamespace
) -> torch.nn.Module:
    """Shards as a module with the attributes that Megatron-Core's layers set on parameters."""
    module = torch.nn.Module()
    module.pg_collection = groups
    module.config = SimpleNamespace(num_moe_experts=None)
    for spec in specs:
        if spec.name not in shards:
            continue
        *path, leaf = spec.name.split(".")
        owner = module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        parameter = torch.nn.Parameter(shards[spec.name], requires_grad=False)
        parameter.tensor_model_parallel = spec.cut.kind != "replicated"
        parameter.partition_dim = spec.cut.axis
        parameter.partition_stride = 2 if spec.cut.kind == "gate_up" else 1
        owner.register_parameter(leaf, parameter)
    return module


def counting_gloo():
    """Megatron-Core's gloo copy service, without its CUDA stream, counting what arrives."""
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    class CountingGloo(GlooCopyService):
        def __init__(self) -> None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.gloo_pg = dist.group.WORLD
            self.send_ops, self.recv_ops, self._copy_stream = [], [], None
            self.received_bytes, self.messages = 0, 0

        def run(self) -> None:
            arriving = [op for op, _ in self.recv_ops if op.src_rank != self.rank]
            self.received_bytes += sum(op.tensor.nbytes for op in arriving)
            self.messages += len(arriving)
            super().run()

    return CountingGloo()


class Peer:
    """Megatron-Core's plan and execution of one resharding, through one of its copy services."""

    def __init__(self, plan: Plan, rank: int, weights: Mapping[str, torch.Tensor], service) -> None:
        from megatron.core.resharding import build_centralized_reshard_plan

        device = next(iter(weights.values())).device
        self.generation = {
            spec.name: torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
            for index, spec in enumerate(plan.specs)
            if (shape := plan.generation_shape(rank, index)) is not None
        }
        self._source = peer_module(plan.specs, weights, _peer_groups(plan.train, rank))
        self._target = peer_module(plan.specs, self.generation, _peer_groups(plan.gen, rank))
        self._plan = build_centralized_reshard_plan(self._source, self._target)
        self.service = service

    def gather(self) -> dict[str, torch.Tensor]:
        from megatron.core.resharding import execute_reshard_plan

        execute_reshard_plan(self._plan, self._source, self._target, self.service)
        return self.generation


def _seconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median wall time of each call, all ranks starting together, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    return [sorted(seconds)[repeats // 2] for seconds in times]


def compare(rank: int, sizes: DecoderSizes, train: ShardGrid, t_g: int, p_g: int, repeats: int = 5):
    """Run both on one rank of an initialised gloo world.

    Returns:
        {"ours"/"megatron": {"received", "messages", "seconds", "plan_seconds"}}, and raises
        AssertionError where the two results differ in a single bit.
    """
    import megatron.core.resharding  # noqa: F401 - seconds that are not part of its set-up

    specs = decoder_specs(sizes)
    gen = generation_grid(train, tp=t_g, pp=p_g, num_layers=sizes.layers)
    start = time.perf_counter()
    plan = make_plan(specs, train, gen, replica=train.axes(rank)[1])
    planned = time.perf_counter() - start
    generator = torch.Generator().manual_seed(rank)
    weights = {
        spec.name: torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype))
        for index, spec in enumerate(specs)
        if (shape := plan.training_shape(rank, index)) is not None
    }
    _share_copies(specs, train, rank, weights)
    ours = Resharder(plan, rank, weights, new_exchange_group(plan))
    start = time.perf_counter()
    peer = Peer(plan, rank, weights, counting_gloo())
    peer_planned = time.perf_counter() - start
    mine, theirs = ours.gather(), peer.gather()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs on rank {rank}"
    received, exchanges = ours.traffic.received_bytes, ours.traffic.exchanges
    peer_received, messages = peer.service.received_bytes, peer.service.messages
    seconds, peer_seconds = _seconds([ours.gather, peer.gather], repeats)
    return {
        "ours": {
            "received": received,
            "messages": exchanges,
            "seconds": seconds,
            "plan_seconds": planned,
        },
        "megatron": {
            "received": peer_received,
            "messages": messages,
            "seconds": peer_seconds,
            "plan_seconds": peer_planned,
        },
    }


def _share_copies(
    specs: tuple[TensorSpec, ...], grid: ShardGrid, rank: int, weights: dict[str, torch.Tensor]
) -> None:
    """Make ranks that hold the same part of a tensor agree on it, as trained replicas do."""
    layers = 1 + max(s.layer for s in specs if s.layer is not None)
    stages = grid.layer_stages(layers)
    for spec in specs:
        owners: dict[object, list[int]] = {}
        for other in range(grid.world_size):
            at = grid.coordinate(other)
            if at.pp in spec.stages(grid.pp, stages):
                part = spec.intervals(grid.tp, at.tp, grid.replicate_kv)
                owners.setdefault(part, []).append(other)
        for ranks in owners.values():
            if len(ranks) < 2:
                continue
            # Point to point keeps it to the owners without a process group for every part.
            if rank == ranks[0]:
                for other in ranks[1:]:
                    dist.send(weights[spec.name], other)
            elif rank in ranks:
                dist.recv(weights[spec.name], ranks[0])


def _run(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    sizes = DecoderSizes(
        layers=args.layers, hidden=args.hidden, ffn=4 * args.hidden, heads=16, kv_heads=8,
        head_dim=args.hidden // 16, vocab=8192,
    )  # fmt: skip
    train = ShardGrid(args.tp, args.pp, dp=args.ranks // (args.tp * args.pp))
    result = compare(rank, sizes, train, args.gen_tp, args.gen_pp)
    everyone: list = [None] * args.ranks
    dist.all_gather_object(everyone, result)
    if rank == 0:
        print(f"tp{args.tp} pp{args.pp} -> tp{args.gen_tp} pp{args.gen_pp}, {args.ranks} ranks")
        print(f"{'':10s}{'received MB':>13s}{'messages':>10s}{'gather s':>10s}{'set-up s':>10s}")
        for side in ("ours", "megatron"):
            rows = [r[side] for r in everyone]
            worst = {key: max(row[key] for row in rows) for key in rows[0]}
            print(f"{side:10s}{worst['received'] / 1e6:13.3f}{worst['messages']:10d}"
                  f"{worst['seconds']:10.4f}{worst['plan_seconds']:10.4f}")  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--gen-tp", type=int, default=2)
    parser.add_argument("--gen-pp", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--port", type=int, default=29571)
    args = parser.parse_args()
    torch.multiprocessing.spawn(_run, args=(args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
