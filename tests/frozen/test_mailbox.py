"""Pure: what goes to a frozen model on ranks of its own, and what comes back, over a real store."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist

from megatron_rl.frozen.mailbox import Mailbox, Sample


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def some(first: int, count: int) -> list[Sample]:
    return [Sample(first + i, i, [random.randrange(2**31) for _ in range(i + 1)])
            for i in range(count)]  # fmt: skip


def test_samples_arrive_once_and_in_order(store):
    ours, theirs = (Mailbox(store, "reward", patience=5.0) for _ in range(2))
    other = Mailbox(store, "reference", patience=5.0)
    sent = [some(0, 3), some(2**40, 1), some(7, 2)]
    other.send(some(100, 1))
    ours.send([])
    for samples in sent[:2]:
        ours.send(samples)
    assert theirs.take(5.0).samples == sent[0] + sent[1]
    assert theirs.take(0.01).samples == []
    ours.send(sent[2])
    ours.end(stopped=True)
    last = theirs.take(5.0)
    assert (last.samples, last.end) == (sent[2], "stopped")
    assert theirs.taken == 4


def test_a_waiting_model_gets_what_is_sent_meanwhile(store):
    ours, theirs = (Mailbox(store, "reward", patience=5.0) for _ in range(2))
    timer = threading.Timer(0.2, ours.send, [some(5, 1)])
    timer.start()
    assert [s.request for s in theirs.take(30.0).samples] == [5]
    timer.join()


def test_results_keep_every_bit_and_are_had_once(store):
    ours, theirs = (Mailbox(store, "reference", patience=0.2) for _ in range(2))
    values = (torch.randn(50) * torch.logspace(-40, 35, 50)).tolist()
    for number in (3, 2**40 + 1):
        theirs.answer(number, values[: number % 7])
    got = ours.results([2**40 + 1, 3])
    assert got == [values[: (2**40 + 1) % 7], values[:3]]
    assert torch.equal(torch.tensor(got[1]), torch.tensor(values[:3]))
    assert ours.results([]) == []
    with pytest.raises(RuntimeError, match="model.reference.ranks gave no results for 0.2 s"):
        ours.results([3])
