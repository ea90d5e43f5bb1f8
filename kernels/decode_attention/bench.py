"""Decode attention against the memory floor and torch: one table on one GPU.

    python -m megatron_rl.kernels.decode_attention.bench [--sweep] [--new]

The floor is the KV bytes over the measured copy bandwidth. Peers, both on a dense cache without
paging: torch's variable-length attention and SDPA. `--sweep` times other schedules and the
head-major cache; `--new` the new token's rotation and write inside, against a launch of its own.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rope_kv_write import rope_kv_write, rope_table
from ..timing import copy_bandwidth, median_ms, turns
from . import NewToken, decode_attention, kernel

BLOCK = 16
# heads, KV heads, head dimension, batch, context, tokens the table has room for
SHAPES = [
    (32, 8, 64, 1, 384, 384), (32, 8, 64, 1, 384, 4096), (32, 8, 64, 64, 256, 4096),
    (32, 8, 64, 256, 256, 256), (32, 8, 64, 256, 256, 4096), (32, 8, 64, 256, 2048, 2048),
    (32, 8, 64, 64, 8192, 8192), (32, 8, 64, 4, 131072, 131072), (32, 8, 128, 1, 384, 4096),
    (32, 8, 128, 32, 384, 4096), (32, 8, 128, 256, 1024, 1024), (32, 8, 128, 32, 8192, 8192),
    (32, 8, 128, 1, 262144, 262144), (64, 8, 128, 128, 2048, 2048), (32, 32, 128, 64, 1024, 1024),
]  # fmt: skip


@dataclass(kw_only=True)
class Case:
    """One layer's inputs: `[B, H, D]` queries and a shuffled paged cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    context: Tensor

    @classmethod
    def random(
        cls, heads: int, groups: int, dim: int, batch: int, context: int, capacity: int
    ) -> Case:
        blocks = -(-context // BLOCK)
        total = batch * blocks
        options = dict(device="cuda", dtype=torch.bfloat16)
        table = torch.zeros(batch, capacity // BLOCK, device="cuda", dtype=torch.int32)
        table[:, :blocks] = torch.randperm(total, device="cuda").view(batch, blocks)
        return cls(
            q=torch.randn(batch, heads, dim, **options),
            k=torch.randn(total, BLOCK, groups, dim, **options),
            v=torch.randn(total, BLOCK, groups, dim, **options),
            table=table,
            context=torch.full((batch,), context, device="cuda", dtype=torch.int32),
        )

    @property
    def kv_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def ours(self) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        return decode_attention(self.q, self.k, self.v, self.table, self.context, scale)

    def scheduled(self, schedule: kernel.Schedule) -> Tensor:
        q_BGRD = self.q.unflatten(1, (self.k.shape[2], -1))
        inputs = (q_BGRD, self.k, self.v, self.table, self.context)
        return kernel.decode_attention(*inputs, self.q.shape[-1] ** -0.5, schedule=schedule)

    def dense(self) -> tuple[Tensor, Tensor]:
        """The caches as `[B, context, G, D]`: what a serving layer without paging would hold."""
        shape = (len(self.q), -1, *self.k.shape[2:])
        return self.k.view(shape), self.v.view(shape)

    def sdpa(self) -> Tensor:
        k, v = (x.transpose(1, 2) for x in self.dense())
        return F.scaled_dot_product_attention(self.q[:, :, None], k, v, enable_gqa=True)

    def varlen(self) -> Callable[[], Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        length = int(self.context[0])
        one = torch.arange(len(self.q) + 1, device="cuda", dtype=torch.int32)
        k, v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        # torch 2.11 groups query heads by itself, later versions on request.
        known = inspect.signature(varlen_attn).parameters
        grouped = {"enable_gqa": True} if "enable_gqa" in known else {}
        return lambda: varlen_attn(self.q, k, v, one, one * length, 1, length, **grouped)


def cases(shape: tuple[int, ...]) -> list[Case]:
    """Enough copies of one shape that together they leave the L2 cache."""
    first = Case.random(*shape)
    return [first, *(Case.random(*shape) for _ in range(turns(first.kv_bytes) - 1))]


def attempt(variants: Callable[[], list[Callable[[], Tensor]]]) -> str:
    """A peer's time in milliseconds, or why there is none."""
    try:
        return f"{median_ms(variants()):.4f}"
    except (RuntimeError, TypeError, ImportError) as error:
        return type(error).__name__


def table(copy: float) -> None:
    columns = "H KV D B context room GB floor_ms ours_ms TB/s of_copy varlen_ms sdpa_ms".split()
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for shape in SHAPES:
        batch = cases(shape)
        floor = batch[0].kv_bytes / copy * 1e3
        ours = median_ms([case.ours for case in batch])
        varlen = attempt(lambda batch=batch: [case.varlen() for case in batch])
        sdpa = attempt(lambda batch=batch: [case.sdpa for case in batch])
        print(
            f"| {' | '.join(map(str, shape))} | {batch[0].kv_bytes / 1e9:.3f} | {floor:.4f} "
            f"| {ours:.4f} | {batch[0].kv_bytes / ours / 1e9:.2f} | {floor / ours:.0%} "
            f"| {varlen} | {sdpa} |",
            flush=True,
        )


def new_tokens() -> None:
    """The new token rotated and written by the attention, or by a launch before it."""
    print("| H | KV | D | B | context | inside us | attention us | + rope_kv_write us |")
    print("|---" * 8 + "|")
    for rows in (1, 64, 256):
        shape = (32, 8, 64, rows, 256, 256)
        _, groups, dim, _, context, _ = shape
        angles = rope_table(1e4 ** -(torch.arange(0, dim, 2, device="cuda") / dim), context)
        position = torch.full((rows,), context - 1, device="cuda")
        k, v = torch.randn(2, rows, groups, dim, device="cuda", dtype=torch.bfloat16)
        new, batch = NewToken(k_BGD=k, v_BGD=v, cos_sin_PR=angles), cases(shape)

        def inside(case: Case, new=new) -> Tensor:
            inputs = (case.q, case.k, case.v, case.table, case.context)
            return decode_attention(*inputs, case.q.shape[-1] ** -0.5, new=new)

        def apart(case: Case, slots: Tensor, new=new, position=position) -> None:
            rope_kv_write(
                case.q, new.k_BGD, new.v_BGD, new.cos_sin_PR, position, case.k, case.v, slots
            )

        slots = [case.table[:, -1].long() * BLOCK + BLOCK - 1 for case in batch]
        variants = (
            [partial(inside, case) for case in batch], [case.ours for case in batch],
            [partial(apart, case, at) for case, at in zip(batch, slots, strict=True)],
        )  # fmt: skip
        times = " | ".join(f"{1e3 * median_ms(calls):.1f}" for calls in variants)
        print(f"| {' | '.join(map(str, shape[:5]))} | {times} |", flush=True)


def sweep(copy: float) -> None:
    """Times schedules and the head-major cache, the fastest first."""
    for shape in (
        (32, 8, 64, 1, 384, 4096), (32, 8, 128, 1, 384, 4096),
        (32, 8, 64, 256, 2048, 2048), (32, 8, 128, 256, 1024, 1024),
    ):  # fmt: skip
        batch = cases(shape)
        floor = batch[0].kv_bytes / copy * 1e3

        def time(plan: kernel.Schedule, batch=batch) -> float:
            return median_ms([lambda case=case: case.scheduled(plan) for case in batch])

        plans = [
            kernel.Schedule(split=split, tile=tile, warps=warps)
            for split, tile, warps in itertools.product((256, 512), (64, 128), (4, 8))
        ]
        print(shape)
        for timed, plan in sorted(((time(plan), plan) for plan in plans), key=lambda p: p[0]):
            print(f"{timed:.4f} ms {floor / timed:.0%} {plan}", flush=True)
        for case in batch:
            case.k, case.v = (
                x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.k, case.v)
            )
        print(f"{median_ms([case.ours for case in batch]):.4f} ms head-major, default schedule")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other schedules and layouts")
    parser.add_argument("--new", action="store_true", help="time the new token's rotation inside")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, bf16, block {BLOCK}, copy {copy / 1e12:.2f} TB/s")
    table(copy)
    if arguments.sweep:
        sweep(copy)
    if arguments.new:
        new_tokens()


if __name__ == "__main__":
    main()
