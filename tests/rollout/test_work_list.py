"""Layer: gloo ranks. Replicas take prompts as they have room; none is lost or done twice."""

from __future__ import annotations

import time

import pytest

from tests.generation.test_greedy_equals_transformers import load

PROMPTS = [list(range(3, 5 + i)) for i in range(12)]


def collected(rank, world, folder, layout, work_list, slow, count=None):
    """(index in the step, tokens) of this rank's samples, and whether its replica was slow."""
    from megatron_rl.generation.engine import EngineSettings
    from megatron_rl.generation.sequence import SamplingParams
    from megatron_rl.resharding.transition import ZeroRepartitioning
    from megatron_rl.rollout.collect import collect
    from megatron_rl.rollout.prompts import Prompt
    from megatron_rl.text import TextTokenizer

    transition = ZeroRepartitioning(load(folder, world, **layout), EngineSettings(max_running=4))
    late = slow and transition.groups.dp_rank == 1
    if late:
        transition.engine.after_step = lambda: time.sleep(0.1)
    prompts = [
        Prompt(index=i, text="", token_ids=tokens, record={}) for i, tokens in enumerate(PROMPTS)
    ][:count]
    batch = collect(
        transition, TextTokenizer(folder), prompts, n=2, first_request=40, first_index=6,
        sampling=SamplingParams(max_new_tokens=8, ignore_eos=True, seed=3), work_list=work_list,
    )  # fmt: skip
    tokens = [ids.tolist() for ids in batch.sequences]
    return dict(zip(batch.index_B.tolist(), tokens, strict=True)), late


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_fast_replica_takes_over_prompts_of_a_slow_one(ranks, tiny_model_dir, layout):
    world = 2 * layout.get("tp", 1)
    args = (str(tiny_model_dir), layout)
    fixed = ranks(world, collected, *args, None, False)
    expected = {k: v for samples, _ in fixed for k, v in samples.items()}
    assert sorted(expected) == list(range(6, 30))
    results = ranks(world, collected, *args, 7, True)
    fast = [samples for samples, late in results if not late]
    slow = [samples for samples, late in results if late]
    assert all(samples == fast[0] for samples in fast), "a replica's ranks have the same samples"
    assert all(samples == slow[0] for samples in slow)
    assert not set(fast[0]) & set(slow[0]), "nothing is done twice"
    assert fast[0] | slow[0] == expected, "nothing is lost, and the tokens are the same"
    assert len(fast[0]) > len(slow[0]) >= 4


@pytest.mark.ranks
def test_prompts_that_all_start_at_once_stay(ranks, tiny_model_dir):
    fixed = ranks(2, collected, str(tiny_model_dir), {}, None, False, 4)
    shared = ranks(2, collected, str(tiny_model_dir), {}, 8, True, 4)
    assert [samples for samples, _ in shared] == [samples for samples, _ in fixed]


@pytest.mark.parametrize(("room", "idle", "expected"), [(5, False, 2), (1, False, 0), (1, True, 1)])
def test_room_is_counted_in_samples(ranks, room, idle, expected):
    assert ranks(1, taken, room, idle)[0] == (list(range(expected)), None)


def taken(rank, world, room, idle):
    from megatron_rl.parallel import Layout, ParallelGroups
    from megatron_rl.rollout.work_list import WorkList

    groups = ParallelGroups(layout=Layout(world_size=1))
    todo = WorkList(groups, own=[0, 1, 2], shared=[], n=2, batch=-room - idle)
    return todo.take(room, idle=idle), WorkList(
        groups, own=[], shared=[], n=2, batch=-9
    ).take(2, idle=True)  # fmt: skip


def claimed(rank, world, folder, layout, number):
    """Whether anybody took a prompt from the list."""
    from torch.distributed import distributed_c10d

    samples, _ = collected(rank, world, folder, layout, number, False)
    assert samples
    return distributed_c10d._get_default_store().check([f"work_list/{number}"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "layout", "number"), [(1, {}, 21), (2, {"tp": 2}, 22), (2, {}, 23)], ids=str
)
def test_one_replica_needs_no_list(ranks, tiny_model_dir, world, layout, number):
    """Its twelve prompts are more than run at once, but there is nobody to share them with."""
    replicas = world // layout.get("tp", 1)
    for asked in ranks(world, claimed, str(tiny_model_dir), layout, number):
        assert asked == (replicas > 1)
