"""Residual-add RMSNorm against the memory floor and torch: one table on one GPU.

    python -m megatron_rl.kernels.rms_norm.bench

The torch peer is an addition and `torch.nn.functional.rms_norm`, which rounds once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..timing import copy_bandwidth, median_ms, turns
from . import reference, rms_norm

SHAPES = [(1, 2048), (64, 2048), (256, 2048), (256, 4096), (8192, 2048), (8192, 8192)]


def main() -> None:
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, bf16, copy {copy / 1e12:.2f} TB/s")
    print("| T | hidden | floor us | ours us | of floor | torch add + rms_norm us | eager us |")
    print("|---|---|---|---|---|---|---|")
    for rows, hidden in SHAPES:
        copies = [
            torch.randn(2, rows, hidden, device="cuda", dtype=torch.bfloat16)
            for _ in range(turns(4 * rows * hidden) if rows > 256 else 1)
        ]
        weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
        floor = 4 * rows * hidden * 2 / copy * 1e6

        def plain(x, residual, weight=weight):
            stream = x + residual
            return F.rms_norm(stream, weight.shape, weight, 1e-5), stream

        def timed(call, copies=copies) -> float:
            return 1e3 * median_ms([lambda pair=pair: call(*pair) for pair in copies])

        ours = timed(lambda x, residual, w=weight: rms_norm(x, w, 1e-5, residual))
        eager = timed(lambda x, residual, w=weight: reference.rms_norm(x, w, 1e-5, residual))
        print(
            f"| {rows} | {hidden} | {floor:.2f} | {ours:.2f} | {floor / ours:.0%} "
            f"| {timed(plain):.2f} | {eager:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
