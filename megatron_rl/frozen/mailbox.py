"""Samples on their way to a frozen model on ranks of its own, and its results on their way back.

Both go through the key-value store of the rendezvous, which all ranks of the run can reach; they
are small beside what the model computes for them. Requests are numbered in the order in which they
were sent, by whichever rank; the model's ranks take them in that order. A result lies there under
the number of its sample in the run until somebody wants it. Messages are JSON: nothing is
unpickled, and an fp32 number comes out as it went in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Sample:
    """What a frozen model needs to know of a sample.

    Attributes:
        request: its number in the run.
        prompt_length: tokens of `tokens` that are the prompt.
        tokens: prompt and response.
    """

    request: int
    prompt_length: int
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What has arrived since the last look.

    Attributes:
        samples: in the order in which they were sent.
        end: the training has ended: "done" or "stopped"; None: more will come.
    """

    samples: list[Sample]
    end: str | None = None


class Mailbox:
    """One frozen model's mail, seen from any rank.

    Args:
        store: of the rendezvous.
        patience: seconds that `results` waits for a result.

    Attributes:
        taken: requests that this rank has taken.
    """

    def __init__(self, store: dist.Store, role: str, *, patience: float) -> None:
        # A connection of its own: a blocking request must not hold up other users of the store.
        self._store = dist.PrefixStore(f"frozen/{role}", store.clone())
        self._role, self._patience = role, patience
        self.taken = 0

    # ---- ranks that train ----------------------------------------------------------------------

    def send(self, samples: Sequence[Sample]) -> None:
        """Hands samples in; returns at once."""
        if samples:
            self._post({"samples": [astuple(sample) for sample in samples]})

    def end(self, *, stopped: bool) -> None:
        """Tells the model's ranks that nothing more will come."""
        self._post({"end": "stopped" if stopped else "done"})

    def _post(self, message: dict) -> None:
        number = self._store.add("sent", 1)
        self._store.set(f"request/{number}", json.dumps(message))

    def results(self, requests: Sequence[int]) -> list[list[float]]:
        """The results of samples, in the order of `requests`; each can be had once.

        Raises:
            RuntimeError: if one is not there in time.
        """
        keys = [f"result/{request}" for request in requests]
        if not keys:
            return []
        try:
            self._store.wait(keys, timedelta(seconds=self._patience))
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"the ranks of model.{self._role}.ranks gave no results for {self._patience:g} s; "
                "give them a layout with more replicas or raise runtime.collective_timeout"
            ) from error
        found = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return found

    # ---- the model's ranks ---------------------------------------------------------------------

    def take(self, patience: float) -> Delivery:
        """Everything that has arrived; waits `patience` seconds for the first."""
        try:
            self._store.wait([self._next], timedelta(seconds=patience))
        except dist.DistStoreError:
            return Delivery(samples=[])
        samples: list[Sample] = []
        while self._store.check([self._next]):
            message = json.loads(self._store.get(self._next))
            self._store.delete_key(self._next)
            self.taken += 1
            if "end" in message:
                return Delivery(samples=samples, end=message["end"])
            samples += [Sample(*fields) for fields in message["samples"]]
        return Delivery(samples=samples)

    @property
    def _next(self) -> str:
        return f"request/{self.taken + 1}"

    def answer(self, request: int, values: Sequence[float]) -> None:
        """Puts the result of a sample where `results` finds it."""
        self._store.set(f"result/{request}", json.dumps(list(values)))
