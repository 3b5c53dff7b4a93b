"""The batcher: one inference thread, and one pass for all requests that waited for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from app.core.errors import Unavailable
from app.recommend.serving import RankedItem, RankRequest, ServingModel

MAX_BATCH = 64
DEEP = 50  # lists longer than this take many times longer: they go by themselves,
MAX_DEEP_BATCH = 8  # few at a time, in turns with the others
MAX_WAITING = 1024
PATIENCE_SECONDS = 10.0
CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    model: ServingModel
    request: RankRequest
    answer: asyncio.Future[list[RankedItem]]
    until: float


class Batcher:
    """Ranks as soon as the thread is free; while it is busy, requests collect.

    A request that has gone away or waited too long is dropped before it is ranked. A batch holds
    requests of one model only. What goes wrong in a batch of several is tried again one by one, so
    that it fails only the request that it belongs to.
    """

    def __init__(self, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, "ncr-inference", torch.set_num_threads, (threads,))
        self._short: deque[_Waiting] = deque()
        self._deep: deque[_Waiting] = deque()
        self._deep_is_next = False
        self._runner: asyncio.Task[None] | None = None

    async def rank(self, model: ServingModel, request: RankRequest) -> list[RankedItem]:
        """The ranked list. Raises Unavailable when too many are waiting already."""
        if len(self._short) + len(self._deep) >= MAX_WAITING:
            raise Unavailable("too many requests are waiting to be ranked", code="overloaded")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[RankedItem]] = loop.create_future()
        queue = self._deep if request.n > DEEP else self._short
        queue.append(_Waiting(model, request, answer, loop.time() + PATIENCE_SECONDS))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await answer

    async def close(self) -> None:
        """Ends the thread after the pass that it is in; what waits is answered with 503."""
        for queue in (self._short, self._deep):
            for one in queue:
                _set_exception(one, Unavailable("the service is stopping", code="stopping"))
            queue.clear()
        if self._runner is not None:
            await asyncio.wait({self._runner}, timeout=CLOSE_SECONDS)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while batch := self._next_batch():
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

    def _next_batch(self) -> list[_Waiting]:
        turns = [(self._short, MAX_BATCH), (self._deep, MAX_DEEP_BATCH)]
        if self._deep_is_next:
            turns.reverse()
        for queue, size in turns:
            if batch := _take(queue, size):
                self._deep_is_next = queue is self._short
                return batch
        return []

    async def _in_thread(self, batch: Sequence[_Waiting]) -> list[list[RankedItem]]:
        loop = asyncio.get_running_loop()
        requests = [one.request for one in batch]
        return await loop.run_in_executor(self._thread, batch[0].model.rank, requests)


def _take(queue: deque[_Waiting], size: int) -> list[_Waiting]:
    """The next requests of one model that somebody still waits for."""
    batch: list[_Waiting] = []
    now = asyncio.get_running_loop().time()
    while queue and len(batch) < size:
        one = queue[0]
        if one.answer.done():  # gone away
            queue.popleft()
        elif one.until < now:
            queue.popleft()
            _set_exception(one, Unavailable("the ranker is behind", code="overloaded"))
        elif batch and one.model is not batch[0].model:
            break
        else:
            batch.append(queue.popleft())
    return batch


def _set_result(one: _Waiting, ranked: list[RankedItem]) -> None:
    if not one.answer.done():
        one.answer.set_result(ranked)


def _set_exception(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
