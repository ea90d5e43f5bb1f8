"""Requests that come and go while others run: an engine under asyncio.

On a replica of several ranks the first one leads: it takes the requests and tells the others before
each step what has changed, which is why they call `follow`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_rl.generation.engine import Engine
from megatron_rl.generation.requests import refusal
from megatron_rl.generation.sequence import Response, SamplingParams, Sequence
from megatron_rl.generation.session import Session

IDLE_SECONDS = 30.0  # well below any collective timeout: followers hear from the leader this often


@dataclass(kw_only=True, slots=True)
class Orders:
    """What changed since the last step."""

    new: list[tuple[int, list[int], SamplingParams]] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    close: bool = False


class AsyncEngine:
    """`await generate(...)` from any number of tasks of one event loop.

    The engine's cache takes its whole budget while requests run. On one rank it is freed when the
    last one ends; on several, `close` ends it, because the followers hold theirs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._group = engine.model.groups.control()
        self._leader = dist.get_global_rank(self._group, 0)
        self._orders = Orders()
        self._wake = asyncio.Event()
        self._items_of: dict[int, asyncio.Queue[int | Response | Exception]] = {}
        self._next = 0
        self._driver: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, request: int | None = None
    ) -> Response:
        """One response.

        Args:
            request: number that keys the noise and names the request to `abort`; the next free one
                where it is None.

        Raises:
            ValueError: the request can't be served; others go on.
        """
        async for item in self._items(prompt, sampling, request):
            if isinstance(item, Response):
                return item
        raise AssertionError("a request ends with a response")

    async def stream(
        self, prompt: list[int], sampling: SamplingParams, request: int | None = None
    ) -> AsyncIterator[int]:
        """The tokens of one response as they come; raises as `generate` does."""
        async for item in self._items(prompt, sampling, request):
            if isinstance(item, int):
                yield item

    def abort(self, request: int) -> None:
        """Ends a request; whoever waits for it gets what there is."""
        self._order().aborted.append(request)

    async def close(self) -> None:
        """Ends the engine, and `follow` on the other ranks; running requests are dropped."""
        if self._group.size() > 1 or self._driver is not None:
            self._order().close = True
            await self._driver

    def follow(self) -> None:
        """The other ranks' part: steps with the leader until it closes."""
        with self.engine.open() as session:
            while not (orders := self._share(None)).close:
                self._apply(session, orders)
                if not session.finished:
                    session.step()

    def _order(self) -> Orders:
        """The orders that the driver will take next; starts it if it does not run."""
        assert self._group.rank() == 0, "only the first rank of a replica takes requests: follow()"
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._wake.set()
        return self._orders

    async def _items(
        self, prompt: list[int], sampling: SamplingParams, request: int | None
    ) -> AsyncIterator[int | Response]:
        number = self._next if request is None else request
        self._next = max(self._next, number) + 1
        if number in self._items_of:
            raise ValueError(f"request {number} is already running; give another number")
        queue = self._items_of[number] = asyncio.Queue()
        self._order().new.append((number, list(prompt), sampling))
        item = None
        try:
            while not isinstance(item, Response):
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Response) and item.finish_reason == "error":
                    raise ValueError(item.error)
                yield item
        finally:
            del self._items_of[number]
            if not isinstance(item, Response | Exception) and self._driver is not None:
                self.abort(number)  # nobody waits for it any more

    async def _drive(self) -> None:
        try:
            with self.engine.open() as session:
                while True:
                    orders, self._orders = self._orders, Orders()
                    self._wake.clear()
                    self._share(orders)
                    if orders.close:
                        return
                    self._deliver([], self._apply(session, orders))
                    if not session.finished:
                        self._deliver(*session.step())
                        await asyncio.sleep(0)
                    elif not self._wake.is_set():
                        if self._group.size() == 1:
                            return
                        await self._idle()
        except Exception as error:
            for queue in self._items_of.values():  # whoever waits must hear of it
                queue.put_nowait(error)
            raise
        finally:
            self._driver = None

    async def _idle(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), IDLE_SECONDS)
        except TimeoutError:
            return

    def _share(self, orders: Orders | None) -> Orders:
        """The leader's orders on every rank of the replica."""
        if self._group.size() == 1:
            return orders
        box = [orders]
        dist.broadcast_object_list(box, self._leader, group=self._group)
        return box[0]

    def _apply(self, session: Session, orders: Orders) -> list[Response]:
        """Takes the orders into the session; responses of requests that can't be served."""
        refused = []
        for number, prompt, sampling in orders.new:
            try:
                self.engine.request(session, number, prompt, sampling)
            except ValueError as error:
                refused.append(refusal(number, prompt, error))
        for number in orders.aborted:
            session.abort(number)
        return refused

    def _deliver(self, advanced: list[Sequence], responses: list[Response]) -> None:
        for sequence in advanced:
            queue = self._items_of.get(sequence.request)
            if queue is not None:
                for token in sequence.tokens[sequence.prompt_length + sequence.delivered :]:
                    queue.put_nowait(token)
                sequence.delivered = sequence.generated
        for response in responses:
            queue = self._items_of.get(response.request)
            if queue is not None:
                queue.put_nowait(response)
