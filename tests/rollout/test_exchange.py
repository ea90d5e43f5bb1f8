"""Layer: pure and gloo ranks. Samples are spread by cost; dynamic sampling fills a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.models.architecture import Architecture, Rope
from megatron_rl.models.flops import sample_flops
from megatron_rl.rollout.batch import concatenate
from megatron_rl.rollout.exchange import SLACK, balanced_owners

COSTS = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=24)


@given(costs=COSTS, dp=st.integers(1, 4), block=st.none() | st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_replica_is_much_busier_than_the_balance_allows(costs, dp, block, data):
    owners = data.draw(st.lists(st.integers(0, dp - 1), min_size=len(costs), max_size=len(costs)))
    result = balanced_owners(costs, owners, dp, block)
    size = block or len(costs)
    for start in range(0, len(costs), size):
        part = range(start, min(start + size, len(costs)))
        loads = [sum(costs[i] for i in part if result[i] == rank) for rank in range(dp)]
        total, largest = sum(loads), max(costs[i] for i in part)
        # Largest first to the lightest is within 4/3 of the best (Graham 1969).
        assert max(loads) <= SLACK * 4 / 3 * max(total / dp, largest) + largest / 3 + 1e-6


def test_equal_work_stays_where_it_is():
    assert balanced_owners([3.0, 3.1, 2.9, 3.0], [1, 0, 1, 0], 2) == [1, 0, 1, 0]
    assert balanced_owners([8.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], 2) == [0, 1, 1, 1]


def test_cost_counts_tokens_attention_and_head_rows():
    arch = Architecture(
        family="llama", hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=100,
        tied=True, norm_eps=1e-5, max_positions=99, rope=Rope(),
    )  # fmt: skip
    weights = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 16
    assert sample_flops(arch, 10, 0) == 3 * (2 * 10 * weights + 2 * 100 * 8)
    assert sample_flops(arch, 10, 4) - sample_flops(arch, 10, 0) == 2 * 4 * 100 * 8
    assert sample_flops(arch, 200, 0) > 2 * sample_flops(arch, 100, 0), "attention is quadratic"


def samples(index, scores, n, width=5):
    """A batch whose every column says which sample it is."""
    from megatron_rl.rollout.batch import RolloutBatch
    from megatron_rl.rollout.prompts import Prompt

    lengths = [i * 7 % width + 1 for i in index]
    prompts = [Prompt(index=i // n, text=f"p{i // n}", token_ids=[1], record={}) for i in index]
    rows = torch.tensor(index, dtype=torch.float32)[:, None]
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).float()
    return RolloutBatch(
        prompts=prompts, texts=[f"t{i}" for i in index], response_lengths=lengths,
        sequences=[torch.full((k + 1,), i) for i, k in zip(index, lengths, strict=True)],
        prompt_lengths=[1] * len(index), index_B=torch.tensor(index),
        request_B=torch.tensor(index) + 1000,
        group_B=torch.tensor(index) // n, finished_B=torch.tensor([i % 2 == 0 for i in index]),
        mask_BR=mask, rollout_logprobs_BR=rows * mask, scores_B=torch.tensor(scores),
        routes=[
            torch.full((2, k, 1), i, dtype=torch.int16)
            for i, k in zip(index, lengths, strict=True)
        ],
        tensors={"values": rows * mask},
    )  # fmt: skip


def check_row(batch, row, number):
    """Row `row` still is the sample that was number `number`."""
    length = number * 7 % 5 + 1
    assert batch.texts[row] == f"t{number}" and batch.response_lengths[row] == length
    assert batch.sequences[row].tolist() == [number] * (length + 1)
    assert batch.routes[row].tolist() == [[[number]] * length] * 2
    assert bool(batch.finished_B[row]) == (number % 2 == 0)
    for values in (batch.rollout_logprobs_BR, batch.tensors["values"]):
        assert values[row].sum() == number * length
    assert batch.mask_BR[row].sum() == length


def test_taking_and_joining_keeps_samples_whole():
    batch = samples(list(range(9)), [0.0] * 9, 3)
    narrow = samples([9, 10, 11], [0.0] * 3, 3, width=5)
    narrow = narrow.take([0, 2])
    joined = concatenate([batch.take([]), batch.take([8, 1]), narrow])
    assert joined.index_B.tolist() == [8, 1, 9, 11] and len(joined) == 4
    for row, number in enumerate([8, 1, 9, 11]):
        check_row(joined, row, number)


def move(rank, world):
    """Replica 0 has all the work; afterwards every sample is somewhere once and unharmed."""
    from megatron_rl.parallel import Layout, ParallelGroups
    from megatron_rl.rollout.exchange import balance

    groups = ParallelGroups(layout=Layout(world_size=world))
    everything = list(range(12))
    batch = samples(everything, [0.0] * 12, 2).take(everything if rank == 0 else [])
    spread = balance(batch, groups, cost=lambda tokens, rows: float(tokens), block=3)
    for row, number in enumerate(spread.index_B.tolist()):
        check_row(spread, row, number)
    again = balance(spread, groups, cost=lambda tokens, rows: float(tokens), block=3)
    assert again is spread, "what is balanced stays"
    return spread.index_B.tolist()


@pytest.mark.ranks
def test_samples_move_whole_and_in_order(ranks):
    shares = ranks(2, move)
    assert sorted(sum(shares, [])) == list(range(12))
    assert all(share == sorted(share) and share for share in shares)
    for share in shares:
        assert all(number ^ 1 in share for number in share), "samples of a prompt stay together"
        assert any(n < 6 for n in share) and any(n >= 6 for n in share), "each block is shared"


def fill(rank, world, prompts, verdicts):
    """Two samples a prompt; `verdicts[k]` says whether prompt k's two scores differ."""
    from megatron_rl.parallel import Layout, ParallelGroups
    from megatron_rl.rollout.dynamic_sampling import fill_batch

    groups = ParallelGroups(layout=Layout(world_size=world))

    def draw(first):
        mine = [first + i for i in range(2 * prompts) if i // 2 % world == rank]
        return samples(mine, [float(verdicts[i // 2] and i % 2) for i in mine], 2)

    try:
        batch, metrics = fill_batch(draw, prompts=prompts, n=2, max_batches=3, groups=groups)
    except RuntimeError as error:
        return str(error)
    kept = [k for k, good in enumerate(verdicts) if good][:prompts]
    for row, index in enumerate(batch.index_B.tolist()):
        assert int(batch.group_B[row]) == index // 2
        check_row(batch, row, kept[index // 2] * 2 + index % 2)
    return batch.index_B.tolist(), metrics


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_first_groups_with_different_scores_fill_the_batch(ranks, world):
    verdicts = [True, False, False, True, False, True, True, True, False, True, True, True]
    results = ranks(world, fill, 4, verdicts)
    assert sorted(sum((r[0] for r in results), [])) == list(range(8))
    for _, metrics in results:
        assert metrics["sampling/batches"] == 2 and metrics["sampling/kept_groups"] == 5 / 8
        assert metrics["sampling/reward_mean"] == 5 / 16


@pytest.mark.ranks
def test_dynamic_sampling_that_never_fills_ends_with_an_error_on_all_ranks(ranks):
    for message in ranks(2, fill, 4, [True] + [False] * 11):
        assert "max_batches = 3" in message and "1 of 4 prompts" in message
        assert "disable dynamic sampling" in message
