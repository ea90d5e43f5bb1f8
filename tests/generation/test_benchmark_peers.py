"""Layer: one gloo rank. The engines that benchmarks/generation.py compares with generate what is
asked for; each checks the lengths of its responses itself."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def compared(rank, world, folder, name):
    sys.path.insert(0, BENCHMARKS)
    try:
        benchmark = importlib.import_module("generation")
        peers = importlib.import_module("generation_peers")
    finally:
        sys.path.remove(BENCHMARKS)
    options = argparse.Namespace(
        model=folder, tp=1, dtype="fp32", batch=[3], prompt=6, new=9, max_running=2, burst=None,
        no_graphs=False, repeats=1, lognormal=4, sigma=1.0,
    )  # fmt: skip
    model = benchmark.build(options)
    run = peers.peer(name, model, options)
    return benchmark.compare(benchmark.Ours(model, options), {name: run}, options, [9, 2, 9])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["static", pytest.param("batch", marks=pytest.mark.slow), "megatron"]
)
def test_a_peer_answers_the_same_requests(ranks, tiny_model_dir, name):
    row = ranks(1, compared, str(tiny_model_dir), name)[0]
    assert row["tokens_per_s"] > 0 and row[name]["tokens_per_s"] > 0
    # One request waits until one of the two that run has ended.
    assert row["steps"] == 11
