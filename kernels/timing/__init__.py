"""Device timing for the kernel benchmarks: medians of graph replays, and the copy floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Calls per graph: enough that a replay's own launch is lost in their time.
CALLS_PER_GRAPH = 24
REPEATS = 11
L2_BYTES = 60e6


def median_ms(variants: Sequence[Callable[[], object]]) -> float:
    """Median device time of one call in milliseconds, over replays of one CUDA graph of calls.

    Give several variants (the same work on different buffers) where one buffer would stay in the
    L2 cache: they take turns, so that the memory is measured and not the cache.
    """
    rounds = max(1, CALLS_PER_GRAPH // len(variants))
    graph = _capture([call for _ in range(rounds) for call in variants])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    return _median_gap_ms(marks) / (rounds * len(variants))


def turns(nbytes: int) -> int:
    """How many buffers of this size have to take turns to leave the L2 cache: three times its size
    together, 32 at most."""
    return min(32, 1 + int(3 * L2_BYTES // nbytes))


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes per second of a device-to-device copy, bytes read plus bytes written.

    Outside a graph: a captured copy becomes a node that the slower copy engine may run.
    """
    source = torch.empty(int(gigabytes * 1e9) // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    target.copy_(source)
    for mark in marks:
        mark.record()
        target.copy_(source)
    return 2 * source.nbytes / (_median_gap_ms(marks) * 1e-3)


def _median_gap_ms(marks: Sequence[torch.cuda.Event]) -> float:
    torch.cuda.synchronize()
    gaps = sorted(a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True))
    return gaps[len(gaps) // 2]


def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
