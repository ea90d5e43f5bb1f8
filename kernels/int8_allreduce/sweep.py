"""Times every schedule of the Triton kernels: ``bench --sweep``.

Each variant first has to give the bits of `reference` on values of every magnitude, with a tail.
The figures are shares of the copy bandwidth of the same run, the best first.

Suffixes: C columns, K blocks, N ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from ..timing import median_ms
from . import kernel, num_blocks, reference
from .kernel import Schedule

BLOCK = 256
RANKS = 8
# A short last block; sizes and strides that are multiples of 16 like those that are timed, so that
# both run the same compiled kernel.
CHECKED = 47 * BLOCK + 80
# Values of a program and its warps: 16 or 32 values a thread; one warp needs no barrier.
CUTS = ((512, 1), (1024, 1), (1024, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
Result = list[torch.Tensor]


def schedules(*, with_conversion: bool) -> Iterator[Schedule]:
    """The schedules of an operation; `with_conversion` if it reads int8."""
    conversions = (False, True) if with_conversion else (False,)
    divisions_and_hints = ((False, False), (True, False), (True, True))
    forms = itertools.product(CUTS, divisions_and_hints, conversions)
    for (values, warps), (shared, streaming), as_floats in forms:
        yield Schedule(
            tile_values=values, warps=warps, shared_reciprocal=shared, bytes_as_floats=as_floats,
            streaming=streaming,
        )  # fmt: skip


def every_magnitude(rows: int, columns: int) -> torch.Tensor:
    """fp32 `[rows, columns]`: outliers, subnormal numbers, zeros, ties, inf and NaN."""
    x = torch.randn(rows, columns) * torch.logspace(-44, 35, columns).roll(columns // 3)
    x[:, : 2 * BLOCK] = torch.randint(-254, 255, (rows, 2 * BLOCK)) / 2.0
    x[:, 0], x[:, BLOCK] = 127.0, -127.0
    x[:, 2 * BLOCK : 3 * BLOCK] = 0.0
    x[0, 3 * BLOCK], x[0, 4 * BLOCK] = float("inf"), float("nan")
    return x


def _message(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rubbish, so that what is not written shows."""
    q_RC = torch.randint(-127, 128, (rows, CHECKED), dtype=torch.int8, device=device)
    return q_RC, torch.rand(rows, num_blocks(CHECKED, BLOCK), device=device)


def quantized(quantize: Callable[..., None], x: torch.Tensor, device: str) -> Result:
    """Bytes and scales, on the CPU."""
    message = _message(len(x), device)
    quantize(x.to(device), *message, BLOCK)
    return [part.cpu() for part in message]


def reduced(reduce: Callable[..., None], sent: Result, device: str) -> Result:
    """Bytes and scales of the sum, on the CPU."""
    q_1C, scale_1K = _message(1, device)
    arrived = (part.to(device) for part in sent)
    reduce(*arrived, BLOCK, q_C=q_1C[0], scale_K=scale_1K[0], factor=1 / RANKS)
    return [q_1C.cpu(), scale_1K.cpu()]


def same_bits(ours: Result, theirs: Result) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0)) for a, b in pairs)


def wrong_schedules(device: str, chosen: Callable[..., Iterator[Schedule]] = schedules) -> set:
    """(operation, schedule) of those whose bits are not the reference's."""
    x = every_magnitude(RANKS, CHECKED)
    narrow, wrong = x.bfloat16(), set()
    # Triton's interpreter widens subnormal bf16 wrongly.
    narrow[narrow.abs() < torch.finfo(torch.bfloat16).tiny] = 0.0
    sent = quantized(reference.quantize, x, "cpu")
    want = quantized(reference.quantize, narrow, "cpu")
    total = reduced(reference.reduce, sent, "cpu")
    for schedule in chosen(with_conversion=False):
        run = with_schedule(kernel.quantize, schedule)
        if not same_bits(quantized(run, narrow, device), want):
            wrong.add(("quantise bf16", schedule))
    for schedule in chosen(with_conversion=True):
        if not same_bits(reduced(with_schedule(kernel.reduce, schedule), sent, device), total):
            wrong.add(("reduce 8 → int8", schedule))
    return wrong


def with_schedule(function: Callable[..., None], schedule: Schedule) -> Callable[..., None]:
    return lambda *args, **kwargs: function(*args, schedule=schedule, **kwargs)


def print_sweep(cases: dict[str, Callable], sizes: list[int], bandwidth: float) -> None:
    """One line per operation, size and schedule: milliseconds and share of the copy.

    Args:
        cases: as in `bench.CASES`: operation → function of the number of values.
        sizes: log2 of the values.
        bandwidth: of a copy, bytes per second.
    """
    wrong = wrong_schedules("cuda")
    for operation, function in (
        ("quantise bf16", kernel.quantize), ("reduce 8 → int8", kernel.reduce),
    ):  # fmt: skip
        for exponent in sizes:
            touched, kind, calls = cases[operation](1 << exponent)
            found = []
            for schedule in schedules(with_conversion=kind == "reduce"):
                milliseconds = median_ms(calls(with_schedule(function, schedule)))
                found.append((milliseconds, schedule))
                torch.cuda.empty_cache()
            for milliseconds, schedule in sorted(found, key=lambda pair: pair[0]):
                share = touched / bandwidth / (milliseconds * 1e-3)
                note = "  WRONG BITS" if (operation, schedule) in wrong else ""
                print(f"{operation:18} 2^{exponent} {milliseconds:8.4f} ms {share:5.0%}  {schedule}"
                      f"{note}", flush=True)  # fmt: skip
