"""Layer: pure. Random requests lose no block, and no shared block is written."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.generation.blocks import DROPPED, Blocks
from megatron_rl.generation.scheduler import Scheduler
from megatron_rl.generation.sequence import SamplingParams, Sequence

SIZE = 4


def make(draw: random.Random, request: int, longest: int) -> list[Sequence]:
    """A prompt and up to four samples of it; beginnings repeat, so that prefixes are shared."""
    length = draw.randint(1, longest - 1)
    prompt = [1] * min(length, draw.choice([0, SIZE, 3 * SIZE]))
    prompt += [draw.randint(0, 2) for _ in range(length - len(prompt))]
    limit = draw.randint(length + 1, longest)
    return [
        Sequence(
            request=request * 10 + i, prompt_length=length, tokens=list(prompt), limit=limit,
            sampling=SamplingParams(stop_token_ids=(0,)),
        )
        for i in range(draw.randint(1, 4))
    ]  # fmt: skip


def check_step(scheduler: Scheduler, step) -> None:
    """What a forward pass of this plan relies on."""
    blocks = scheduler.blocks
    assert sum(step.new_tokens) <= scheduler.max_batch_tokens or step.decodes
    written = []
    for sequence, new in zip(step.sequences, step.new_tokens, strict=True):
        end = min(sequence.computed + max(new, step.decodes), sequence.limit)
        first, last = sequence.computed // SIZE, (end - 1) // SIZE
        assert last < len(sequence.table.blocks), "every new token has a block"
        own = sequence.table.blocks[first : last + 1]
        assert DROPPED not in own
        if step.decodes:
            assert all(blocks._references[b] == 1 for b in own), "a shared block would be written"
        written += own
    assert len(set(written)) == len(written), "two sequences would write one block"


def run(
    draw: random.Random, *, steps: int, slots: int, window: int | None, burst: int, ahead: int = 0
) -> Scheduler:
    """`slots` of a pipeline, or one that plans `ahead` steps further."""
    longest = draw.randint(8, 40)
    blocks = Blocks(-(-longest // SIZE) + draw.randint(4, 24), SIZE)
    scheduler = Scheduler(
        blocks, max_batch_tokens=draw.randint(3, 30), max_running=draw.randint(1, 12), slots=slots,
        window=window, burst=burst,
    )  # fmt: skip
    flying, finished, asked = [None] * (slots - 1), set(), set()
    depth = slots + ahead
    for number in range(steps):
        if draw.random() < 0.3 and len(scheduler.waiting) < 20:
            first, *others = make(draw, number, longest)
            first.followers = others
            asked |= {s.request for s in (first, *others)}
            scheduler.add(first)
        busy = {s.request for step in flying if step for s, _ in step.draws}
        busy |= {s.request for step in flying if step for s in step.sequences}
        if draw.random() < 0.05 and slots == 1 and asked - finished - busy:
            request = draw.choice(sorted(asked - finished - busy))
            assert scheduler.remove(request) is not None, "it is somewhere"
            finished.add(request)
        advance(draw, scheduler, flying, finished, number % slots, depth)
    number = steps
    while not scheduler.finished or any(flying):
        advance(draw, scheduler, flying, finished, number % slots, depth)
        number += 1
        assert number < steps + 20_000, "it never ends"
    assert finished == asked
    assert blocks.free == blocks.count and not any(blocks._references)
    return scheduler


def advance(
    draw: random.Random, scheduler: Scheduler, flying: list, finished: set, slot: int, depth: int
) -> None:
    while len(flying) < depth:
        step = scheduler.next_step(slot)
        flying.append(step)
        if step is None:
            break
        check_step(scheduler, step)
        scheduler.launched(step)
    step = flying.pop(0)
    if step is None:
        return
    for _ in range(max(step.decodes, 1)):
        for sequence, _ in step.draws:
            if sequence.finish_reason is None:
                sequence.extend([draw.randint(0, 9)], [0.0], [0.0])
    finished |= {s.request for s in scheduler.complete(step)}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), slots=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, None, 6, 13]), burst=st.sampled_from([1, 8]),
    ahead=st.sampled_from([0, 1, 2]),
)  # fmt: skip
def test_random_requests_lose_no_block(seed, slots, window, burst, ahead):
    ahead = ahead if slots == 1 else 0
    run(random.Random(seed), steps=400, slots=slots, window=window, burst=burst, ahead=ahead)


def test_the_cases_that_matter_occur():
    """Ten runs preempt and share; else the test above shows nothing."""
    runs = [
        run(random.Random(seed), steps=400, slots=1, window=None, burst=1) for seed in range(10)
    ]
    assert sum(s.preemptions for s in runs) > 50
    assert sum(s.blocks.shared_blocks for s in runs) > 50


def test_samples_of_a_prompt_fork_and_copy_on_write():
    blocks = Blocks(20, SIZE)
    scheduler = Scheduler(blocks, max_batch_tokens=64, max_running=8)
    made = [
        Sequence(request=i, prompt_length=6, tokens=[1, 2, 3, 4, 5, 6], limit=20,
                 sampling=SamplingParams())
        for i in range(3)
    ]  # fmt: skip
    made[0].followers = made[1:]
    scheduler.add(made[0])
    step = scheduler.next_step()
    assert step.sequences == [made[0]] and step.draws == [(s, 0) for s in made]
    scheduler.launched(step)
    assert [s.table.blocks for s in made] == [made[0].table.blocks] * 3
    assert blocks.free == 18, "the prompt is kept once"
    for token, sequence in enumerate(made):
        sequence.extend([token], [0.0], [0.0])
    assert scheduler.complete(step) == []
    step = scheduler.next_step()
    assert len(step.copies) == 2, "the last of three sharers writes in place"
    assert len({s.table.blocks[1] for s in made}) == 3
    assert len({s.table.blocks[0] for s in made}) == 1


def test_a_window_gives_blocks_back():
    blocks = Blocks(10, SIZE)
    scheduler = Scheduler(blocks, max_batch_tokens=64, max_running=8, window=6)
    sequence = Sequence(request=0, prompt_length=5, tokens=[1] * 5, limit=200,
                        sampling=SamplingParams())  # fmt: skip
    scheduler.add(sequence)
    while sequence.finish_reason is None:
        step = scheduler.next_step()
        scheduler.launched(step)
        sequence.extend([7], [0.0], [0.0])
        scheduler.complete(step)
        assert blocks.count - blocks.free <= 3, "6 tokens lie in at most 3 blocks of 4"
    assert len(sequence.tokens) == 200 and blocks.free == blocks.count
