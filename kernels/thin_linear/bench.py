"""The linear layer of a few rows against the memory floor and the matrix library.

    python -m megatron_rl.kernels.thin_linear.bench

The peer runs the same layers as separate calls: rms_norm, torch's linear, swiglu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..rms_norm import rms_norm
from ..swiglu import swiglu
from ..timing import copy_bandwidth, median_ms, turns
from . import Norm, kernel

# name, inputs, weight rows, with norm, gated: the layers of Llama 3.2 1 B and Llama 3.1 8 B
LAYERS = [
    ("1b qkv", 2048, 3072, True, False), ("1b proj", 2048, 2048, False, False),
    ("1b gate/up", 2048, 16384, True, True), ("1b down", 8192, 2048, False, False),
    ("8b qkv", 4096, 6144, True, False), ("8b proj", 4096, 4096, False, False),
    ("8b gate/up", 4096, 28672, True, True), ("8b down", 14336, 4096, False, False),
]  # fmt: skip
SCHEDULES = [kernel.Schedule(tile=t, warps=w) for t in (4096, 8192, 16384) for w in (2, 4, 8)]


def main() -> None:
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, bf16, copy {copy / 1e12:.2f} TB/s")
    print("| layer | B | floor us | ours us | of floor | best schedule | us | separate calls us |")
    print("|---|---|---|---|---|---|---|---|")
    for name, inputs, outputs, with_norm, gated in LAYERS:
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            for _ in range(turns(2 * inputs * outputs))
        ]
        norm_weight = torch.randn(inputs, device="cuda", dtype=torch.bfloat16)
        for rows in (1, 2, 4):
            x, residual = torch.randn(2, rows, inputs, device="cuda", dtype=torch.bfloat16)
            norm = Norm(weight_K=norm_weight, eps=1e-5, residual_BK=residual)
            norm = norm if with_norm else None

            def separate(w, x=x, norm=norm, gated=gated):
                if norm is not None:
                    x, _ = rms_norm(x, norm.weight_K, norm.eps, norm.residual_BK)
                y = F.linear(x, w)
                return swiglu(y) if gated else y

            def ours(schedule, x=x, norm=norm, gated=gated, weights=weights) -> float:
                return 1e3 * median_ms([
                    lambda w=w: kernel.thin_linear(x, w, None, norm, gated, schedule)
                    for w in weights
                ])  # fmt: skip

            default, times = ours(kernel.DEFAULT), {s: ours(s) for s in SCHEDULES}
            best = min(times, key=times.get)
            floor = 2 * inputs * outputs / copy * 1e6
            peer = 1e3 * median_ms([lambda w=w: separate(w) for w in weights])
            print(
                f"| {name} | {rows} | {floor:.2f} | {default:.2f} | {floor / default:.0%} "
                f"| {best.tile}/{best.warps} | {times[best]:.2f} | {peer:.2f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
