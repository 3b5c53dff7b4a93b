"""The batcher: inference threads, and one pass for all requests that waited for a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.core.errors import Unavailable
from app.inference.metrics import InferenceMetrics
from ncr_core.inference.engine import (
    InferenceEngine,
    PairwiseComparison,
    RankedItem,
    RerankRequest,
)
from ncr_core.inference.retrieval import RankRequest, UserState

MAX_BATCH = 64
MAX_BATCH_PAIRS = 2**16  # of items: 64 plain lists compare at most 55,424
MAX_SHORT_ITEMS = 50  # longer lists take many times as long
MAX_SLOW_BATCH = 8
MAX_SLOW_BATCH_PAIRS = 20_000  # a list of 200 items in the worst order compares 19,900
MAX_WAITING = 1024
MAX_WAIT_SECONDS = 0.05  # of the first in a queue that is longer than a pass takes
MAX_SLOW_WAIT_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
GONE_CHECK_SECONDS = 0.02  # a client that has waited so long is asked whether it is still there
CLOSE_SECONDS = 2.0


class ClientGone(Unavailable):
    """The client has disconnected, and no request waits for the result."""

    code = "client_gone"

    def __init__(self) -> None:
        super().__init__("the client has disconnected")


IsGone = Callable[[], Awaitable[bool]]
"""Tells whether the client has disconnected."""

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    engine: InferenceEngine
    operation: Callable[[InferenceEngine, Sequence[Any]], list[Any]]
    """The operation of the engine. A batch has one operation on one engine."""
    request: Any
    pairs: int
    """The maximum number of item pairs that the request compares."""
    result: asyncio.Future[Any]
    since: float
    is_gone: IsGone | None

    def joins(self, other: _Waiting) -> bool:
        """Whether the two may be in one batch."""
        return self.engine is other.engine and self.operation is other.operation


@dataclass(slots=True, eq=False)
class _Queue:
    """Requests of one speed."""

    max_batch: int
    max_pairs: int
    """The maximum number of item pairs in a batch, unless one request alone has more."""
    max_wait: float
    waiting: deque[_Waiting] = field(default_factory=deque)

    def is_full(self, now: float) -> bool:
        """Whether a new request would wait for more than the next pass, and for too long."""
        if len(self.waiting) < self.max_batch:
            return False
        return len(self.waiting) >= MAX_WAITING or now - self.waiting[0].since > self.max_wait


class _Lane:
    """An inference thread, and the queues that take turns on the thread."""

    def __init__(self, name: str, threads: int, queues: Iterable[_Queue]) -> None:
        self.thread = ThreadPoolExecutor(1, name, torch.set_num_threads, (threads,))
        self.turns = deque(queues)
        self.runner: asyncio.Task[None] | None = None

    def next_queue(self) -> _Queue | None:
        """The queue whose turn it is: the first in ``turns`` with a request."""
        for queue in self.turns:
            if queue.waiting:
                self.turns.remove(queue)
                self.turns.append(queue)
                return queue
        return None

    @property
    def busy(self) -> bool:
        """Whether a pass is running or due."""
        return self.runner is not None and not self.runner.done()


# The operations that a batch may hold.


def _rank(engine: InferenceEngine, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
    return engine.rank(requests)


def _rerank(engine: InferenceEngine, requests: Sequence[RerankRequest]) -> list[list[RankedItem]]:
    return engine.rerank(requests)


def _compare(
    engine: InferenceEngine, requests: Sequence[RerankRequest]
) -> list[PairwiseComparison]:
    return engine.compare(requests)


def _user_vectors(engine: InferenceEngine, users: Sequence[UserState]) -> list[NDArray[np.float32]]:
    return engine.user_vectors(users)


class Batcher:
    """Runs a pass as soon as a thread is free; requests collect while the thread is busy.

    Quick requests are short lists of users whose vector and candidates are at hand. Quick requests
    have a thread of their own, and wait for no other request. On the second thread, the other short
    lists take turns with long or explained lists. A pass has a maximum number of requests and of
    compared item pairs, so that a pass is a small unit of work.

    The batcher drops a request before its pass if the client has gone or the request has waited too
    long. After an error in a batch of several requests, the batcher tries each request alone, so
    that only the request with the error fails.
    """

    def __init__(self, threads: int, metrics: InferenceMetrics | None = None) -> None:
        self._quick = _Queue(MAX_BATCH, MAX_BATCH_PAIRS, MAX_WAIT_SECONDS)
        slow = MAX_SLOW_BATCH, MAX_SLOW_BATCH_PAIRS, MAX_SLOW_WAIT_SECONDS
        self._slow, self._long = _Queue(*slow), _Queue(*slow)
        self._lanes = (
            _Lane("ncr-quick", threads, [self._quick]),
            _Lane("ncr-slow", threads, [self._slow, self._long]),
        )
        self._closed = False
        self._metrics = metrics or InferenceMetrics()

    async def rank(
        self,
        engine: InferenceEngine,
        request: RankRequest,
        is_gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
        *,
        ready: bool,
    ) -> list[RankedItem]:
        """The ranked list.

        Args:
            engine: the model.
            request: the list.
            is_gone: tells whether the client has disconnected.
            on_slow: called where the request has to wait in a queue that is not quick.
            ready: whether the vector and the candidates are at hand, see `CandidateRetriever`.

        Raises:
            Unavailable: too many requests wait already, or the request waited too long.
            ClientGone: the request was dropped, because the client has gone.
        """
        is_short = request.depth <= MAX_SHORT_ITEMS and request.explain_by is None
        queue = self._queue(is_short, ready)
        if queue is not self._quick and on_slow is not None:
            on_slow()
        pairs = engine.pairs_to_rank(request)
        if request.explain_by is not None:
            pairs = queue.max_pairs  # to explain a list takes longer than to rank it
        return await self._submit(queue, engine, _rank, request, pairs, is_gone)

    async def rerank(
        self, engine: InferenceEngine, request: RerankRequest, is_gone: IsGone | None = None
    ) -> list[RankedItem]:
        """The request's items, ranked. Raises as ``rank``."""
        queue, pairs = self._queue_of(engine, request), engine.pairs_to_rerank(request)
        return await self._submit(queue, engine, _rerank, request, pairs, is_gone)

    async def compare(
        self, engine: InferenceEngine, request: RerankRequest, is_gone: IsGone | None = None
    ) -> PairwiseComparison:
        """The request's items, compared. Raises as ``rank``."""
        queue, pairs = self._queue_of(engine, request), engine.pairs_to_compare(request)
        return await self._submit(queue, engine, _compare, request, pairs, is_gone)

    async def user_vector(
        self, engine: InferenceEngine, user: UserState, is_gone: IsGone | None = None
    ) -> NDArray[np.float32]:
        """(E,) the user's vector. Raises as ``rank``."""
        queue = self._queue(True, engine.retriever.has_vector(user))
        return await self._submit(queue, engine, _user_vectors, user, 0, is_gone)

    def _queue(self, is_short: bool, ready: bool) -> _Queue:
        if not is_short:
            return self._long
        return self._quick if ready else self._slow

    def _queue_of(self, engine: InferenceEngine, request: RerankRequest) -> _Queue:
        is_short = len(request.rows) <= MAX_SHORT_ITEMS
        return self._queue(is_short, engine.retriever.has_vector(request.user))

    async def _submit(
        self,
        queue: _Queue,
        engine: InferenceEngine,
        operation: Callable[[InferenceEngine, Sequence[Request]], list[Result]],
        request: Request,
        pairs: int,
        is_gone: IsGone | None,
    ) -> Result:
        self._check(queue)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        queue.waiting.append(
            _Waiting(engine, operation, request, pairs, result, loop.time(), is_gone)
        )
        lane = next(lane for lane in self._lanes if queue in lane.turns)
        if not lane.busy:
            lane.runner = asyncio.create_task(self._run(lane))
        return await result

    @property
    def busy(self) -> bool:
        """Whether a pass is running or due."""
        return any(lane.busy for lane in self._lanes)

    def check(self) -> None:
        """Raises Unavailable where too many requests wait already, or after `close`."""
        self._check(self._quick)

    def _check(self, queue: _Queue) -> None:
        if self._closed:
            raise _stopping()
        if queue.is_full(asyncio.get_running_loop().time()):
            self._metrics.refused.inc()
            raise Unavailable(
                "too many requests wait for the ranker; retry later", code="overloaded"
            )

    async def close(self) -> None:
        """Ends each thread after its current pass; waiting and later requests get 503."""
        self._closed = True
        for queue in (self._quick, self._slow, self._long):
            for one in queue.waiting:
                _set_exception(one, _stopping())
            queue.waiting.clear()
        runners = {lane.runner for lane in self._lanes if lane.runner is not None}
        if runners:
            await asyncio.wait(runners, timeout=CLOSE_SECONDS)
        for lane in self._lanes:
            lane.thread.shutdown(wait=False)

    async def _run(self, lane: _Lane) -> None:
        while queue := lane.next_queue():
            batch = await self._take(queue)
            if not batch:
                continue
            try:
                lists = await self._in_thread(lane.thread, batch)
            except Exception as error:
                if len(batch) == 1:
                    _set_exception(batch[0], error)
                    continue
                for one in batch:
                    try:
                        _set_result(one, (await self._in_thread(lane.thread, [one]))[0])
                    except Exception as error_of_one:
                        _set_exception(one, error_of_one)
            else:
                for one, ranked in zip(batch, lists, strict=True):
                    _set_result(one, ranked)

    async def _take(self, queue: _Queue) -> list[_Waiting]:
        """The next batch: the oldest request and those that join it, without dropped requests."""
        batch: list[_Waiting] = []
        now = asyncio.get_running_loop().time()
        waiting, position, pairs = queue.waiting, 0, 0
        while position < len(waiting) and len(batch) < queue.max_batch:
            one = waiting[position]
            if batch and not one.joins(batch[0]):
                position += 1  # it keeps its place before those that come later
                continue
            if batch and pairs + one.pairs > queue.max_pairs:
                break
            del waiting[position]
            waited = now - one.since
            if one.result.done():
                self._metrics.dropped.inc()
            elif waited > TIMEOUT_SECONDS:
                self._metrics.dropped.inc()
                _set_exception(
                    one, Unavailable("the ranker is overloaded; retry later", code="overloaded")
                )
            elif waited > GONE_CHECK_SECONDS and await _has_gone(one):
                self._metrics.dropped.inc()
                _set_exception(one, ClientGone())
            else:
                batch.append(one)
                pairs += one.pairs
        return batch

    async def _in_thread(self, thread: Executor, batch: Sequence[_Waiting]) -> list[Any]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        requests = [one.request for one in batch]
        try:
            operation, engine = batch[0].operation, batch[0].engine
            return await loop.run_in_executor(thread, operation, engine, requests)
        finally:
            took = loop.time() - started
            self._metrics.passed(took, [started - one.since for one in batch])


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping", code="stopping")


async def _has_gone(one: _Waiting) -> bool:
    if one.is_gone is None:
        return False
    try:
        return await one.is_gone()
    except Exception as error:  # what its connection has to say must not stop the others
        _set_exception(one, error)
        return True


def _set_result(one: _Waiting, result: Any) -> None:
    if not one.result.done():
        one.result.set_result(result)


def _set_exception(one: _Waiting, error: Exception) -> None:
    if not one.result.done():
        one.result.set_exception(error)
