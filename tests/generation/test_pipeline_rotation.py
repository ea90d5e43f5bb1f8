"""Layer: gloo ranks. Pipeline stages decode different micro-batches at the same time.

Each stage's forward pass is made to last 80 ms, far more than what the host does in between, so
that the recorded intervals show who works while whom.
"""

from __future__ import annotations

import pytest

from tests.generation.test_greedy_equals_transformers import load

SECONDS, NEW = 0.08, 14


def timeline(rank, world, folder):
    import time

    from megatron_rl.generation import runner
    from megatron_rl.generation.engine import Engine
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(load(folder, world, pp=world))
    intervals, forward = [], runner.stage_forward

    def slow(*args):
        begin = time.monotonic()
        out = forward(*args)
        time.sleep(SECONDS)
        intervals.append((begin, time.monotonic()))
        return out

    runner.stage_forward = slow
    try:
        sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        prompts = [[1 + i, 2, 3] for i in range(2 * world)]
        responses = engine.generate(prompts, sampling)
    finally:
        runner.stage_forward = forward
    return intervals, engine.counts, [r.token_ids for r in responses]


@pytest.mark.ranks
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_work_on_different_micro_batches(ranks, tiny_model_dir, stages):
    results = ranks(stages, timeline, str(tiny_model_dir))
    steps = [intervals for intervals, _, _ in results]
    count = len(steps[0])
    assert count == stages * NEW and all(len(s) == count for s in steps)
    steady = range(2 * stages, count - 2 * stages)
    together = 0
    for number in steady:
        begin, end = steps[-1][number]
        middle = (begin + end) / 2
        # While the last stage works on micro-batch j, the stage k before it works on j + k.
        ahead = [steps[stage][number + stages - 1 - stage] for stage in range(stages)]
        together += all(first <= middle <= last for first, last in ahead)
    assert together >= 0.9 * len(steady), f"{together} of {len(steady)}"
    assert results[0][1].occupancy > 0.9
    alone = ranks(1, timeline, str(tiny_model_dir))[0][2]
    assert results[0][2][: len(alone)] == alone
