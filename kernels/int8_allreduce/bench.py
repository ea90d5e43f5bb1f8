"""int8 kernels on one GPU, against the bandwidth of a copy: ``python -m
megatron_rl.kernels.int8_allreduce.bench``.

The floor of an operation is (bytes it must read + write) / the copy bandwidth measured in the same
run. Bytes per value, block 256: fp32 quantise 4 + 1 + 4/256 = 5.016, with a bf16 residual 4 more;
a reduction of 8 rows 8 · 1.016 + 1.016 per summed value, 1.143 per value read; dequantise 5.016.
Buffers rotate so that the L2 cache cannot hold them. Peers: eager torch and ``torch.compile`` of
the same maths, and where they are installed bitsandbytes' block-wise 8-bit and torchft's fp8 rows.

The last column is a plain copy of as many bytes, which small sizes slow down too.

``--path`` prints the whole arithmetic of 8 ranks on this GPU, next to a bf16 sum of 8 gradients.
``--sweep`` times the schedules of the two Triton kernels that miss the goal, see `sweep`, instead.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence

import torch

from ..timing import copy_bandwidth, median_ms
from . import num_blocks, reference, select_backend
from .sweep import print_sweep

BLOCK = 256
RANKS = 8
ROTATED_BYTES = 256 << 20
SLOW_AT = 26  # the one size (log2) at which eager and compiled torch run: they only cost time
Call = Callable[[], object]


def _messages(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and scales, in buffers of their own: torch.compile refuses views of one."""
    q_RC = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
    return q_RC, torch.rand(rows, num_blocks(columns, BLOCK), device="cuda") + 0.5


def _copies(bytes_touched: float) -> int:
    return max(1, min(16, int(ROTATED_BYTES / bytes_touched)))


def quantize_case(values: int, dtype: torch.dtype, residual: bool):
    """(bytes touched, maker of calls for three functions of one implementation)."""
    touched = values * (dtype.itemsize + 1 + 4 / BLOCK + 4 * residual)

    def calls(quantize: Callable) -> list[Call]:
        made = []
        for _ in range(_copies(touched)):
            x = torch.randn(1, values, device="cuda", dtype=dtype)
            kept = torch.zeros(1, values, device="cuda", dtype=torch.bfloat16) if residual else None
            message = _messages(1, values)
            made.append(lambda x=x, m=message, k=kept: quantize(x, *m, BLOCK, k))
        return made

    return touched, "quantize", calls


def reduce_case(values: int, requantize: bool):
    """Eight rows of ``values / 8``."""
    columns = values // RANKS
    touched = values * (1 + 4 / BLOCK) + columns * ((1 + 4 / BLOCK) if requantize else 4)

    def calls(reduce: Callable) -> list[Call]:
        made = []
        for _ in range(_copies(touched)):
            rows, (q_1C, scale_1K) = _messages(RANKS, columns), _messages(1, columns)
            target = {"out_C": torch.empty(columns, device="cuda")}
            if requantize:
                target = {"q_C": q_1C[0], "scale_K": scale_1K[0]}
            made.append(lambda r=rows, t=target: reduce(*r, BLOCK, **t))
        return made

    return touched, "reduce", calls


def dequantize_case(values: int, dtype: torch.dtype):
    touched = values * (dtype.itemsize + 1 + 4 / BLOCK)

    def calls(dequantize: Callable) -> list[Call]:
        made = []
        for _ in range(_copies(touched)):
            out = torch.empty(1, values, device="cuda", dtype=dtype)
            message = _messages(1, values)
            made.append(lambda o=out, m=message: dequantize(*m, BLOCK, o))
        return made

    return touched, "dequantize", calls


def copy_calls(touched: float) -> list[Call]:
    """Plain copies that touch as many bytes: what the device reaches at this size."""
    pairs = [
        torch.randint(0, 255, (2, int(touched) // 2), dtype=torch.uint8, device="cuda")
        for _ in range(_copies(touched))
    ]
    return [lambda p=pair: p[1].copy_(p[0]) for pair in pairs]


CASES = {
    "quantise fp32": lambda n: quantize_case(n, torch.float32, False),
    "quantise bf16": lambda n: quantize_case(n, torch.bfloat16, False),
    "quantise fp32 + residual": lambda n: quantize_case(n, torch.float32, True),
    "reduce 8 → int8": lambda n: reduce_case(n, True),
    "reduce 8 → fp32": lambda n: reduce_case(n, False),
    "dequantise fp32": lambda n: dequantize_case(n, torch.float32),
    "dequantise bf16": lambda n: dequantize_case(n, torch.bfloat16),
}


def implementations() -> dict[str, Callable[[str], Callable]]:
    """Name → function of the operation's name."""
    compiled: dict[str, Callable] = {}

    def compile_once(operation: str) -> Callable:
        if operation not in compiled:
            compiled[operation] = torch.compile(getattr(reference, operation), dynamic=False)
        return compiled[operation]

    backends = {name: select_backend("cuda", name) for name in ("cuda", "triton")}
    ours = {
        name: lambda operation, b=backend: getattr(b, operation)
        for name, backend in backends.items()
    }
    return {
        **ours,
        "compile": compile_once,
        "eager": lambda operation: getattr(reference, operation),
    }


def event_median_ms(calls: Sequence[Call], repeats: int = 20) -> float:
    """For peers that cannot be captured in a graph."""
    times = []
    for index in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[3:])[repeats // 2]


def peer_times(values: int) -> dict[str, float]:
    """Milliseconds of installed peers' 8-bit quantise and dequantise of fp32."""
    times = {}
    x = torch.randn(values, device="cuda")
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes.functional as bnb

        q, state = bnb.quantize_blockwise(x, blocksize=BLOCK)
        times["bitsandbytes quantise"] = event_median_ms(
            [lambda: bnb.quantize_blockwise(x, blocksize=BLOCK)]
        )
        times["bitsandbytes dequantise"] = event_median_ms(
            [lambda: bnb.dequantize_blockwise(q, state)]
        )
    if importlib.util.find_spec("torchft"):
        from torchft import quantization as torchft

        rows = [x.view(-1, 4096)]
        packed = torchft.fused_quantize_into_fp8(rows, RANKS)
        times["torchft fp8 quantise"] = event_median_ms(
            [lambda: torchft.fused_quantize_into_fp8(rows, RANKS)]
        )
        times["torchft fp8 reduce"] = event_median_ms(
            [lambda: torchft.fused_reduce_fp8(rows, packed, RANKS, 0)]
        )
        times["torchft fp8 dequantise"] = event_median_ms(
            [lambda: torchft.fused_dequantize_from_fp8(rows, packed, RANKS)]
        )
    return times


def print_table(sizes: Sequence[int], bandwidth: float) -> None:
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; cells: ms (share of it)")
    makers = implementations()
    columns = [*makers, "copy"]
    print(f"{'operation':26}{'values':>8}" + "".join(f"{name:>18}" for name in columns))
    for operation, case in CASES.items():
        for exponent in sizes:
            touched, kind, calls = case(1 << exponent)
            row = f"{operation:26}{f'2^{exponent}':>8}"
            for name, maker in makers.items():
                if name in ("compile", "eager") and exponent != SLOW_AT:
                    row += f"{'':>18}"
                    continue
                milliseconds = median_ms(calls(maker(kind)))
                share = touched / bandwidth / (milliseconds * 1e-3)
                row += f"{f'{milliseconds:.4f} ({share:.0%})':>18}"
                torch.cuda.empty_cache()
            milliseconds = median_ms(copy_calls(touched))
            print(f"{row}{f'{milliseconds:.4f}':>18}", flush=True)


def print_path(values: int) -> None:
    """What 8 ranks compute for one gradient each, and the error that comes out."""
    grads = [torch.randn(RANKS, values // RANKS, device="cuda") for _ in range(RANKS)]
    narrow = [g.to(torch.bfloat16) for g in grads]
    kernels = select_backend("cuda")
    columns = values // RANKS
    sent = [_messages(RANKS, columns) for _ in range(RANKS)]
    sums = _messages(RANKS, columns)
    out = torch.empty(RANKS, columns, device="cuda")
    arrived = [
        (torch.stack([q[n] for q, _ in sent]), torch.stack([s[n] for _, s in sent]))
        for n in range(RANKS)
    ]

    def one_rank() -> None:
        kernels.quantize(grads[0], *sent[0], BLOCK)
        kernels.reduce(*arrived[0], BLOCK, q_C=sums[0][0], scale_K=sums[1][0])
        kernels.dequantize(*sums, BLOCK, out)

    def bf16_sum() -> None:
        total = narrow[0].clone()
        for other in narrow[1:]:
            total += other

    int8_ms, bf16_ms = median_ms([one_rank] * 2), median_ms([bf16_sum] * 2)
    exact = sum(g.double() for g in grads)
    for n in range(RANKS):
        kernels.quantize(grads[n], *sent[n], BLOCK)
    for n in range(RANKS):
        q_NC, scale_NK = torch.stack([q[n] for q, _ in sent]), torch.stack([s[n] for _, s in sent])
        kernels.reduce(q_NC, scale_NK, BLOCK, q_C=sums[0][n], scale_K=sums[1][n])
    kernels.dequantize(*sums, BLOCK, out)
    total = sum(narrow[1:], narrow[0].clone())
    print(
        f"8 ranks of 2^{values.bit_length() - 1} values on one GPU: int8 path {8 * int8_ms:.3f} ms "
        f"({int8_ms:.3f} a rank), relative error {float((out - exact).norm() / exact.norm()):.2e}; "
        f"bf16 sum of 8 {bf16_ms:.3f} ms, relative error "
        f"{float((total - exact).norm() / exact.norm()):.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 22, 24, 26, 28, 30])
    parser.add_argument("--path", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="other schedules, bits checked")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    if options.sweep:
        print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
        return print_sweep(CASES, options.sizes, bandwidth)
    print_table(options.sizes, bandwidth)
    for name, milliseconds in peer_times(1 << 28).items():
        print(f"{name:26}{'2^28':>8}{milliseconds:18.4f}")
    if options.path:
        print_path(1 << 28)


if __name__ == "__main__":
    main()
