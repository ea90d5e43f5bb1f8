"""Speed of offloading against the link itself: `python benchmarks/offload.py [--gigabytes 2.5]`.

Offloads and fetches tensors of a 1.2 B model's sizes, pinned and pageable, beside one large pinned
copy each way, which is what PCIe gives. Peak memory of whole runs is in their metrics
(`memory/<phase>_allocated_gb`); run one with and one without `hybrid_engine.*_offload`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_rl.config.training import OffloadSettings
from megatron_rl.engine.offload import Offloaded

SHAPES = [(128256, 2048)] + 16 * [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]


def seconds(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median over 7 calls after 2 to warm up, the device drained at both ends."""
    times = []
    for _ in range(9):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def link_rates(nbytes: int) -> dict[str, float]:
    """Bytes per second of one large pinned copy each way."""
    device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return {
        "out": nbytes / seconds(lambda: host.copy_(device)),
        "in": nbytes / seconds(lambda: device.copy_(host)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.5, help="size of the plain copy")
    parser.add_argument("--num-threads", type=int, default=4, help="for pageable memory")
    args = parser.parse_args()
    link = link_rates(int(args.gigabytes * 1e9))
    print(f"{torch.cuda.get_device_name()}: pinned copy {link['out'] / 1e9:.1f} GB/s out, "
          f"{link['in'] / 1e9:.1f} GB/s in")  # fmt: skip
    weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
    nbytes = sum(w.nbytes for w in weights)
    for pinned in (True, False):
        settings = OffloadSettings(
            enable=True, offload_device="cpu", pin_memory=pinned, num_threads=args.num_threads
        )
        part = Offloaded("the model", lambda: weights, settings)
        part.offload()
        rates = {
            "out": nbytes / seconds(part.offload, before=part.load),
            "in": nbytes / seconds(part.load, before=part.offload),
        }
        shown = ", ".join(f"{way} {rate / 1e9:.1f} GB/s ({rate / link[way]:.0%} of the link)"
                          for way, rate in rates.items())  # fmt: skip
        print(f"  {nbytes / 1e9:.2f} GB in {len(weights)} tensors, pinned={pinned}: {shown}")


if __name__ == "__main__":
    main()
