"""The batcher: one inference thread, and one pass for all requests that waited for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.core.errors import Unavailable
from app.recommend.candidates import RankRequest
from app.recommend.given import Comparison, GivenItems
from app.recommend.metrics import RankerMetrics
from app.recommend.places import RankedItem
from app.recommend.serving import ServingModel

MAX_BATCH = 64
DEEP = 50  # lists longer than this take many times longer, as do users whose candidates have to
MAX_SLOW_BATCH = 8  # be found first: they go by themselves, few at a time, in turns with the others
MAX_WAITING = 1024
MAX_WAIT_SECONDS = 0.05  # who comes when more wait than a pass takes, the first for so long
MAX_SLOW_WAIT_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
GONE_SECONDS = 0.02  # who has waited so long is asked whether they are still there
CLOSE_SECONDS = 2.0


class ClientGone(Exception):  # noqa: N818 - it is what happened, not an error to report
    """Nobody waits for the list any more."""


IsGone = Callable[[], Awaitable[bool]]


Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    run: Callable[[Sequence[Any]], list[Any]]
    """Of a model: a batch holds what is run by the same."""
    request: Any
    answer: asyncio.Future[Any]
    since: float
    gone: IsGone | None


@dataclass(slots=True, eq=False)
class _Queue:
    """Requests of one kind."""

    max_batch: int
    max_wait: float
    waiting: deque[_Waiting] = field(default_factory=deque)

    def behind(self, now: float) -> bool:
        """Whether what joins now would wait for more than the next pass, and for too long."""
        if len(self.waiting) < self.max_batch:
            return False
        return len(self.waiting) >= MAX_WAITING or now - self.waiting[0].since > self.max_wait


class Batcher:
    """Ranks as soon as the thread is free; while it is busy, requests collect.

    A request that has gone away or waited too long is dropped before it is ranked. A batch holds
    requests of one kind to one model only. What goes wrong in a batch of several is tried again one
    by one, so that it fails only the request that it belongs to.
    """

    def __init__(self, threads: int, metrics: RankerMetrics | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, "ncr-inference", torch.set_num_threads, (threads,))
        self._quick = _Queue(MAX_BATCH, MAX_WAIT_SECONDS)
        self._slow = _Queue(MAX_SLOW_BATCH, MAX_SLOW_WAIT_SECONDS)
        self._slow_is_next = False
        self._runner: asyncio.Task[None] | None = None
        self._metrics = metrics or RankerMetrics()

    async def rank(
        self,
        model: ServingModel,
        request: RankRequest,
        gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> list[RankedItem]:
        """The ranked list. ``gone`` tells whether nobody waits for it any more; ``on_slow`` is told
        that it is not one of the quick ones.

        Raises Unavailable when too many are waiting already, ClientGone when it was dropped.
        """
        explained = request.explain_by is not None
        quick = request.depth <= DEEP and not explained and model.at_hand(request)
        if not quick and on_slow is not None:
            on_slow()
        return await self._answer(model.rank, request, quick, gone)

    async def rank_given(
        self, model: ServingModel, given: GivenItems, gone: IsGone | None = None
    ) -> list[RankedItem]:
        """The given items, ranked. As ``rank``."""
        quick = len(given.rows) <= DEEP and model.has_vector(given.whose)
        return await self._answer(model.rank_given, given, quick, gone)

    async def compare(
        self, model: ServingModel, given: GivenItems, gone: IsGone | None = None
    ) -> Comparison:
        """The given items, compared. As ``rank``."""
        quick = len(given.rows) <= DEEP and model.has_vector(given.whose)
        return await self._answer(model.compare, given, quick, gone)

    async def vector(
        self, model: ServingModel, request: RankRequest, gone: IsGone | None = None
    ) -> NDArray[np.float32]:
        """(E,) the user's vector. As ``rank``."""
        return await self._answer(model.user_vectors, request, model.has_vector(request), gone)

    async def _answer(
        self,
        run: Callable[[Sequence[Request]], list[Answer]],
        request: Request,
        quick: bool,
        gone: IsGone | None,
    ) -> Answer:
        queue = self._quick if quick else self._slow
        self._check(queue)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        queue.waiting.append(_Waiting(run, request, answer, loop.time(), gone))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await answer

    @property
    def busy(self) -> bool:
        """Whether something is being ranked, or waits to be."""
        return self._runner is not None and not self._runner.done()

    def check(self) -> None:
        """Raises Unavailable when too many are waiting already, whatever would be asked for."""
        self._check(self._quick)

    def _check(self, queue: _Queue) -> None:
        if queue.behind(asyncio.get_running_loop().time()):
            self._metrics.refused.inc()
            raise Unavailable("too many requests are waiting to be ranked", code="overloaded")

    async def close(self) -> None:
        """Ends the thread after the pass that it is in; what waits is answered with 503."""
        for queue in (self._quick, self._slow):
            for one in queue.waiting:
                _set_exception(one, Unavailable("the service is stopping", code="stopping"))
            queue.waiting.clear()
        if self._runner is not None:
            await asyncio.wait({self._runner}, timeout=CLOSE_SECONDS)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while queue := self._next_queue():
            batch = await self._take(queue)
            if not batch:
                continue
            try:
                lists = await self._in_thread(batch)
            except Exception as error:
                if len(batch) == 1:
                    _set_exception(batch[0], error)
                    continue
                for one in batch:
                    try:
                        _set_result(one, (await self._in_thread([one]))[0])
                    except Exception as own:
                        _set_exception(one, own)
            else:
                for one, ranked in zip(batch, lists, strict=True):
                    _set_result(one, ranked)

    def _next_queue(self) -> _Queue | None:
        turns = [self._quick, self._slow]
        if self._slow_is_next:
            turns.reverse()
        for queue in turns:
            if queue.waiting:
                self._slow_is_next = queue is self._quick
                return queue
        return None

    async def _take(self, queue: _Queue) -> list[_Waiting]:
        """The next requests of one kind that somebody still waits for."""
        batch: list[_Waiting] = []
        now = asyncio.get_running_loop().time()
        while queue.waiting and len(batch) < queue.max_batch:
            one = queue.waiting[0]
            if batch and one.run != batch[0].run:
                break
            queue.waiting.popleft()
            waited = now - one.since
            if one.answer.done():
                self._metrics.dropped.inc()
            elif waited > PATIENCE_SECONDS:
                self._metrics.dropped.inc()
                _set_exception(one, Unavailable("the ranker is behind", code="overloaded"))
            elif waited > GONE_SECONDS and await _is_gone(one):
                self._metrics.dropped.inc()
                _set_exception(one, ClientGone())
            else:
                batch.append(one)
        return batch

    async def _in_thread(self, batch: Sequence[_Waiting]) -> list[Any]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        requests = [one.request for one in batch]
        try:
            return await loop.run_in_executor(self._thread, batch[0].run, requests)
        finally:
            took = loop.time() - started
            self._metrics.passed(took, [started - one.since for one in batch])


async def _is_gone(one: _Waiting) -> bool:
    if one.gone is None:
        return False
    try:
        return await one.gone()
    except Exception as error:  # what its connection has to say must not stop the others
        _set_exception(one, error)
        return True


def _set_result(one: _Waiting, answer: Any) -> None:
    if not one.answer.done():
        one.answer.set_result(answer)


def _set_exception(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
