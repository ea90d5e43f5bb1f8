"""SwiGLU against the memory floor and eager torch: one table on one GPU.

python -m megatron_rl.kernels.swiglu.bench
"""

from __future__ import annotations

import torch

from ..timing import copy_bandwidth, median_ms, turns
from . import reference, swiglu

SHAPES = [(1, 8192), (64, 8192), (256, 8192), (256, 14336), (8192, 8192)]


def main() -> None:
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, bf16, copy {copy / 1e12:.2f} TB/s")
    print("| T | F | floor us | ours us | of floor | eager torch us |")
    print("|---|---|---|---|---|---|")
    for rows, width in SHAPES:
        sources = [
            torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
            for _ in range(turns(4 * rows * width) if rows > 256 else 1)
        ]
        floor = 6 * rows * width / copy * 1e6
        ours = 1e3 * median_ms([lambda x=x: swiglu(x) for x in sources])
        eager = 1e3 * median_ms([lambda x=x: reference.swiglu(x) for x in sources])
        print(
            f"| {rows} | {width} | {floor:.2f} | {ours:.2f} | {floor / ours:.0%} | {eager:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
