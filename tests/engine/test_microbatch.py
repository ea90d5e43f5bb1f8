"""Layer: pure and gloo ranks. How a batch becomes micro-batches, and how many a schedule runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engine.microbatch import balanced_split, partition
from tests.engine import invariance_case as case

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@given(lengths=LENGTHS, budget=st.integers(60, 200), quadratic=st.booleans())
@settings(max_examples=60, deadline=None)
def test_token_budget_holds_every_sequence_once(lengths, budget, quadratic):
    costs = [float(n * n) for n in lengths] if quadratic else None
    parts = partition(lengths, micro_batch_size=None, max_tokens=budget, costs=costs)
    assert sorted(sum(parts, [])) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in part) <= budget for part in parts)
    assert len(parts) <= 2 * -(-sum(lengths) // budget) + 1, "not many more than are needed"


@given(lengths=LENGTHS, size=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_fixed_size_keeps_the_order(lengths, size):
    parts = partition(lengths, micro_batch_size=size, max_tokens=None)
    assert sum(parts, []) == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1]) and 0 < len(parts[-1]) <= size


@given(costs=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30), parts=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_balanced_split_is_near_the_best(costs, parts):
    lists = balanced_split(costs, parts)
    assert sorted(sum(lists, [])) == list(range(len(costs)))
    heaviest = max(sum(costs[i] for i in part) for part in lists)
    # A list exceeds the mean by at most the last cost that was put on it (Graham 1969).
    assert heaviest <= sum(costs) / parts + max(costs) + 1e-6
    assert len(costs) < parts or all(lists), "none is empty while there are enough"


def test_sequence_longer_than_the_budget_is_refused():
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch is 10, .* has 11 tokens"):
        partition([3, 11], micro_batch_size=None, max_tokens=10)


def watch_schedules(rank, world, folder, spec, logp_BR):
    """Micro-batches of every schedule call in a log-prob pass and in an update."""
    from unittest import mock

    from megatron_rl.engine import schedule
    from megatron_rl.engine.passes import logprob_pass
    from megatron_rl.engine.update import actor_loss

    calls, run = [], schedule._run

    def watched(model, batches, fn, *, forward_only):
        calls.append((forward_only, len(batches), sum(b.inert for b in batches)))
        return run(model, batches, fn, forward_only=forward_only)

    config = case.configuration(spec, folder, "ppo_actor")
    trainable = case.build("actor", config, folder, world)
    batch = case.share(trainable.model.groups.dp_rank, spec["dp"], logp_BR)
    with mock.patch.object(schedule, "_run", watched):
        logprob_pass(batch, trainable.model, config)
        loss = actor_loss(trainable.model, config, 0.1)
        case.step(trainable, batch, config, loss)
    return calls, len(batch)


@pytest.mark.ranks
def test_all_ranks_run_as_many_micro_batches_and_a_pass_runs_them_in_one_call(ranks, tiny_model):
    """A pipeline that is drained after every micro-batch would be idle half of the time."""
    spec = {**case.ONE_RANK, "dp": 2, "pipeline": "pp2", "micro": 1}
    logp_BR = torch.zeros(len(case.LENGTHS), 12)
    results = ranks(4, watch_schedules, str(tiny_model("llama_tied")), spec, logp_BR)
    assert {samples for _, samples in results} == {5, 3}, "replicas have unequal shares"
    for calls, samples in results:
        assert calls == [(True, samples, 0), (False, 5, 5 - samples)]


def streams(rank, world, folder, padded):
    """Stream length, positions and rows of a micro-batch under sequence parallelism."""
    from megatron_rl.engine.microbatch import pack

    config = case.configuration({**case.ONE_RANK, "tensor": "tp2_sp"}, folder, "ppo_actor")
    model = case.build("actor", config, folder, world, trainable=False)
    sequences = [torch.arange(n) + 10 for n in (4, 3, 6)]
    batch = pack(sequences, [2, 1, 5], model=model, rows="response", padded=padded)
    tokens, rows = batch.tokens_T, batch.attention.rows_N
    following = [int(tokens[r + 1]) for r in rows]
    return len(tokens), batch.attention.positions_T.tolist(), following, batch.labels_N.tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("padded", [False, True])
def test_stream_is_a_multiple_of_tp_and_positions_start_anew(ranks, tiny_model, padded):
    folder = str(tiny_model("llama_tied"))
    for length, positions, following, labels in ranks(2, streams, folder, padded):
        spans = [6, 6, 6] if padded else [4, 3, 6]
        assert length % 2 == 0 and length - sum(spans) < 2
        assert positions[: sum(spans)] == sum((list(range(n)) for n in spans), [])
        assert following == labels == [12, 13, 11, 12, 15]
