"""Pack and unpack of a whole model on one GPU: `python -m megatron_rl.kernels.reshard.bench`.

The shapes are those of a training layout with tp=8 going to generation tp=4, 2 and 1. Packing reads
one rank's training shards into a send buffer; unpacking reads 8/t_g shards as they were received
and writes the generation tensors, with the interleavings of Megatron-Core's gated MLP and
row-parallel layers. Every variant starts from a poisoned target and must end with the bytes of
`torch.cat`. "eager" is the median of calls between CUDA events with the device idle before, so
launch gaps count, as they do in a run; "replayed" is the same work as a CUDA graph. The floor is
(bytes read + bytes written) / the best copy bandwidth measured in the same run.

`--peer` adds Megatron-Core's own execution of the same copies, with the network left out: an
in-process copy service at world size one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..timing import copy_bandwidth, median_ms
from .kernel import copy_blocks_triton
from .table import LANES, BlockCopy, CopyTable

TRAIN_TP = 8
BUCKET_BYTES = 256 * 2**20
PEER = "Megatron-Core, no network"


@dataclass(frozen=True)
class Tensor2D:
    """A training shard (rows, cols) in bf16 and how shards join: "rows", "gate_up", "columns"."""

    rows: int
    cols: int
    join: str


def model_shards(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    tied: bool,
) -> list[Tensor2D]:  # fmt: skip
    """One tensor rank's training shards that are cut at all (norms move no bytes)."""
    t = TRAIN_TP
    layer = [
        Tensor2D((heads + 2 * kv_heads) * head_dim // t, hidden, "rows"),
        Tensor2D(hidden, heads * head_dim // t, "columns"),
        Tensor2D(2 * ffn // t, hidden, "gate_up"),
        Tensor2D(hidden, ffn // t, "columns"),
    ]
    embedding = Tensor2D(vocab // t, hidden, "rows")
    return [embedding, *layer * layers, *([] if tied else [embedding])]


MODELS = {
    # Qwen2.5-0.5B has 14 heads in 2 groups; 8 ranks need each group padded to 8.
    "qwen2.5-0.5b": model_shards(24, 896, 4864, 16, 2, 64, 151936, tied=True),
    "llama-8b": model_shards(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
}


class Unpack:
    """Received shards (S, rows, cols) of every tensor, and the generation tensors they make up."""

    def __init__(self, shards: list[Tensor2D], gen_tp: int, device: str) -> None:
        self.sources = TRAIN_TP // gen_tp
        self.tensors = shards
        self.received = [
            torch.empty(self.sources, t.rows, t.cols, dtype=torch.bfloat16, device=device).normal_()
            for t in shards
        ]
        s = self.sources
        self.joined = [
            torch.empty(
                (t.rows, s * t.cols) if t.join == "columns" else (s * t.rows, t.cols),
                dtype=torch.bfloat16,
                device=device,
            )
            for t in shards
        ]

    def blocks(self) -> list[BlockCopy]:
        return [
            block
            for tensor, shards, out in zip(self.tensors, self.received, self.joined, strict=True)
            for block in self._tensor_blocks(tensor, shards, out)
        ]

    def _tensor_blocks(self, tensor: Tensor2D, shards: torch.Tensor, out: torch.Tensor):
        row, size = tensor.cols * 2, tensor.rows * tensor.cols * 2
        for s in range(self.sources):
            if tensor.join == "columns":
                yield BlockCopy(
                    shards, out, s * size, s * row, tensor.rows, row, row, self.sources * row
                )
            elif tensor.join == "gate_up":
                half, up = size // 2, self.sources * size // 2
                yield BlockCopy(shards, out, s * size, s * half, 1, half, half, half)
                yield BlockCopy(shards, out, s * size + half, up + s * half, 1, half, half, half)
            else:
                yield BlockCopy(shards, out, s * size, s * size, 1, size, size, size)

    def cat(self) -> None:
        """The same with `torch.cat`, one call per tensor."""
        for tensor, shards, out in zip(self.tensors, self.received, self.joined, strict=True):
            if tensor.join == "gate_up":
                halves = shards.view(self.sources, 2, tensor.rows // 2, tensor.cols)
                torch.cat([*halves[:, 0], *halves[:, 1]], out=out)
            else:
                torch.cat(list(shards), dim=int(tensor.join == "columns"), out=out)


def pack_blocks(shards: list[Tensor2D], device: str) -> list[BlockCopy]:
    """One rank's shards into one send buffer."""
    tensors = [
        torch.empty(t.rows, t.cols, dtype=torch.bfloat16, device=device).normal_() for t in shards
    ]
    buffer = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8, device=device)
    offsets = itertools.accumulate((t.nbytes for t in tensors), initial=0)
    return [
        BlockCopy(t, buffer, 0, offset, 1, t.nbytes, t.nbytes, t.nbytes)
        for t, offset in zip(tensors, offsets, strict=False)
    ]


def strided_views(blocks: list[BlockCopy]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(destination, source) views of every block as bf16, for the torch variants."""

    def view(tensor: torch.Tensor, offset: int, stride: int, block: BlockCopy) -> torch.Tensor:
        flat = tensor.view(-1).view(torch.bfloat16)
        shape, strides = (block.rows, block.row_bytes // 2), (stride // 2, 1)
        return flat.as_strided(shape, strides, flat.storage_offset() + offset // 2)

    return (
        [view(b.dst, b.dst_offset, b.dst_stride, b) for b in blocks],
        [view(b.src, b.src_offset, b.src_stride, b) for b in blocks],
    )


def bucketed(blocks: list[BlockCopy]) -> list[CopyTable]:
    """Tables of about one bucket each, as a run launches them."""
    tables, held, size = [], [], 0
    for block in blocks:
        if held and size + block.nbytes > BUCKET_BYTES:
            tables.append(CopyTable(held))
            held, size = [], 0
        held.append(block)
        size += block.nbytes
    return [*tables, CopyTable(held)]


def peer_execution(blocks: list[BlockCopy]) -> Callable[[], None]:
    """Megatron-Core's `execute_reshard_plan` of the same copies inside one process."""
    import torch.distributed as dist
    from megatron.core.resharding import ReshardPlan, TransferOp, execute_reshard_plan
    from megatron.core.resharding.copy_services.base import CopyService

    class InProcess(CopyService):
        def __init__(self) -> None:
            self.sent: list[torch.Tensor] = []
            self.wanted: list[torch.Tensor] = []

        def submit_send(self, src_tensor: torch.Tensor, dest_rank: int) -> None:
            self.sent.append(src_tensor)

        def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int) -> None:
            self.wanted.append(dest_tensor)

        def run(self) -> None:
            for out, value in zip(self.wanted, self.sent, strict=True):
                out.copy_(value)
            self.sent, self.wanted = [], []

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    targets, sources = strided_views(blocks)
    modules = []
    for views in (sources, targets):
        module = torch.nn.Module()
        for index, tensor in enumerate(views):
            module.register_parameter(f"p{index}", torch.nn.Parameter(tensor, requires_grad=False))
        modules.append(module)
    whole = (slice(None), slice(None))
    plan = ReshardPlan(
        [TransferOp(f"p{i}", 0, True, whole, whole) for i in range(len(blocks))],
        [TransferOp(f"p{i}", 0, False, whole, whole) for i in range(len(blocks))],
    )
    return lambda: execute_reshard_plan(plan, *modules, service=InProcess())


def eager_ms(call: Callable[[], None], repeats: int = 9) -> float:
    """Median time of one call between events, the device idle before each."""
    times = []
    for step in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if step >= 2:
            times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def best_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes per second, read plus written, of the faster of a memory copy and a torch kernel.

    Between two buffers of one device the driver's copy can be the slower one.
    """
    source = torch.empty(int(gigabytes * 1e9) // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    milliseconds = median_ms([lambda: torch.neg(source, out=target)])
    return max(copy_bandwidth(gigabytes), 2 * source.nbytes / (milliseconds * 1e-3))


def variants(blocks: list[BlockCopy], tune: bool, peer: bool) -> dict[str, Callable[[], None]]:
    targets, sources = strided_views(blocks)
    tables, buckets = {}, bucketed(blocks)
    for lanes in (1024, 2048, 4096) if tune else (LANES,):
        tables[lanes] = CopyTable(blocks, lanes)
    calls: dict[str, Callable[[], None]] = {}
    for lanes, table in tables.items():
        for warps in (4, 8) if tune else (4,):
            calls[f"triton {lanes}/{warps}"] = lambda t=table, w=warps: copy_blocks_triton(t, w)
    calls[f"triton, {len(buckets)} buckets"] = lambda: [copy_blocks_triton(t) for t in buckets]
    calls["copy_ loop"] = lambda: [t.copy_(s) for t, s in zip(targets, sources, strict=True)]
    calls["_foreach_copy_"] = lambda: torch._foreach_copy_(targets, sources)
    if peer:
        calls[PEER] = peer_execution(blocks)
    return calls


def report(title: str, blocks: list[BlockCopy], calls: dict, bandwidth: float) -> None:
    """Check and time every variant; one line each."""
    nbytes = sum(b.nbytes for b in blocks)
    floor = 2 * nbytes / bandwidth * 1e3
    print(f"\n{title}: {nbytes / 1e9:.2f} GB in {len(blocks)} blocks, floor {floor:.3f} ms")
    print(f"  {'':28s} {'eager ms':>9s} {'replayed':>9s} {'of floor':>9s}")
    targets, sources = strided_views(blocks)
    outputs = {id(b.dst): b.dst for b in blocks}.values()
    for name, call in calls.items():
        for out in outputs:
            out.view(torch.uint8).fill_(0xA5)
        call()
        right = all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
        eager = eager_ms(call)
        # The peer's execution synchronises with the host, which a graph cannot hold.
        replayed = eager if name == PEER else median_ms([call])
        verdict = "" if right else "  WRONG BYTES"
        print(f"  {name:28s} {eager:9.3f} {replayed:9.3f} {floor / replayed:9.1%}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), nargs="*", default=sorted(MODELS))
    parser.add_argument("--gen-tp", type=int, nargs="*", default=[4, 2, 1])
    parser.add_argument("--tune", action="store_true", help="time every tile size")
    parser.add_argument("--peer", action="store_true", help="time Megatron-Core's execution too")
    args = parser.parse_args()
    bandwidth = best_bandwidth()
    card = torch.cuda.get_device_name()
    print(f"{card}: copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}")
    for name in args.model:
        blocks = pack_blocks(MODELS[name], "cuda")
        calls = variants(blocks, args.tune, args.peer)
        report(f"{name} pack", blocks, calls, bandwidth)
        del blocks, calls
        for gen_tp in args.gen_tp:
            torch.cuda.empty_cache()
            unpack = Unpack(MODELS[name], gen_tp, "cuda")
            blocks = unpack.blocks()
            calls = {**variants(blocks, args.tune, args.peer), "torch.cat": unpack.cat}
            report(f"{name} unpack tp 8 -> {gen_tp}", blocks, calls, bandwidth)
            del unpack, blocks, calls


if __name__ == "__main__":
    main()
