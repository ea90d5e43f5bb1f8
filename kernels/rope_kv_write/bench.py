"""RoPE + paged KV write against the memory floor and eager torch: one table on one GPU.

python -m megatron_rl.kernels.rope_kv_write.bench
"""

from __future__ import annotations

import torch

from ..timing import copy_bandwidth, median_ms
from . import reference, rope_kv_write, rope_table

BLOCK = 16
# tokens, heads, KV heads, head dimension
SHAPES = [(1, 32, 8, 64), (64, 32, 8, 64), (256, 32, 8, 64), (256, 32, 8, 128), (8192, 32, 8, 128)]


def main() -> None:
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, bf16, copy {copy / 1e12:.2f} TB/s")
    print("| T | H | KV | D | floor us | ours us | of floor | eager torch us |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens, heads, groups, dim in SHAPES:
        qkv = torch.randn(tokens, heads + 2 * groups, dim, device="cuda", dtype=torch.bfloat16)
        q, k, v = qkv.split((heads, groups, groups), dim=1)
        blocks = max(64, 2 * tokens // BLOCK)
        k_cache = torch.zeros(blocks, BLOCK, groups, dim, device="cuda", dtype=torch.bfloat16)
        v_cache = torch.zeros_like(k_cache)
        slots = torch.randperm(blocks * BLOCK, device="cuda")[:tokens]
        positions = torch.randint(0, 4096, (tokens,), device="cuda")
        inv_freq = 1e4 ** -(torch.arange(0, dim, 2, device="cuda") / dim)
        table = rope_table(inv_freq, 4096)
        fused = (q, k, v, table, positions, k_cache, v_cache, slots)

        def eager(fused=fused) -> None:
            q, k, v, table, positions, k_cache, v_cache, slots = fused
            cos, sin = table[positions][:, None].chunk(2, dim=-1)
            reference.rotate(q, cos, sin)
            k_cache.flatten(0, 1).index_copy_(0, slots, reference.rotate(k, cos, sin))
            v_cache.flatten(0, 1).index_copy_(0, slots, v)

        # Reads q, k, v; writes q, the key twice and the value once.
        floor = (qkv.nbytes + q.nbytes + 2 * k.nbytes + v.nbytes) / copy * 1e6
        ours = 1e3 * median_ms([lambda fused=fused: rope_kv_write(*fused)])
        print(
            f"| {tokens} | {heads} | {groups} | {dim} | {floor:.2f} | {ours:.2f} "
            f"| {floor / ours:.0%} | {1e3 * median_ms([eager]):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
