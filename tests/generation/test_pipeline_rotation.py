"""Layer: gloo ranks. Pipeline stages decode different micro-batches at the same time.

In the steady state every forward pass of a stage waits inside until all stages are inside one, each
with another micro-batch. Stages that waited for each other's tokens would never meet.
"""

from __future__ import annotations

import pytest

from tests.generation.test_greedy_equals_transformers import load

NEW, PATIENCE = 14, 60.0


def meetings(rank, world, folder):
    """Whether this stage met all others in each pass of the steady state."""
    import time

    import torch.distributed as dist

    from megatron_rl.generation import runner
    from megatron_rl.generation.engine import Engine
    from megatron_rl.generation.sequence import SamplingParams

    engine = Engine(load(folder, world, pp=world))
    store = dist.PrefixStore(f"meetings/{folder}", dist.distributed_c10d._get_default_store())
    passes, met, forward = [], [], runner.stage_forward

    def together(*args):
        out = forward(*args)
        # While the last stage works on micro-batch j, the stage k before it works on j + k.
        tick = len(passes) + rank
        passes.append(tick)
        if 2 * world <= tick < world * (NEW - 2) and all(met):
            met.append(meet(f"tick/{tick}"))
        return out

    def meet(key: str) -> bool:
        store.add(key, 1)
        deadline = time.monotonic() + PATIENCE
        while store.add(key, 0) < world:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    runner.stage_forward = together
    try:
        sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        prompts = [[1 + i, 2, 3] for i in range(2 * world)]
        responses = engine.generate(prompts, sampling)
    finally:
        runner.stage_forward = forward
    return len(passes), met, engine.counts, [r.token_ids for r in responses]


@pytest.mark.ranks
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_work_on_different_micro_batches(ranks, tiny_model_dir, stages):
    results = ranks(stages, meetings, str(tiny_model_dir))
    for passes, met, counts, _ in results:
        assert passes == stages * NEW and len(met) == stages * (NEW - 4) and all(met)
        assert counts.occupancy > 0.9
    alone = ranks(1, meetings, str(tiny_model_dir))[0][3]
    assert results[0][3][: len(alone)] == alone
