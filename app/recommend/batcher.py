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
MAX_DEEP_BATCH = 8  # few at a time, so that others get their turn
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
        self._waiting: deque[_Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def rank(self, model: ServingModel, request: RankRequest) -> list[RankedItem]:
        """The ranked list. Raises Unavailable when too many are waiting already."""
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("too many requests are waiting to be ranked", code="overloaded")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[RankedItem]] = loop.create_future()
        self._waiting.append(_Waiting(model, request, answer, loop.time() + PATIENCE_SECONDS))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await answer

    async def close(self) -> None:
        """Ends the thread after the pass that it is in; what waits is answered with 503."""
        for one in self._waiting:
            _set_exception(one, Unavailable("the service is stopping", code="stopping"))
        self._waiting.clear()
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
        batch: list[_Waiting] = []
        now = asyncio.get_running_loop().time()
        while self._waiting:
            one = self._waiting[0]
            if one.answer.done():  # gone away
                self._waiting.popleft()
            elif one.until < now:
                self._waiting.popleft()
                _set_exception(one, Unavailable("the ranker is behind", code="overloaded"))
            elif batch and not _fits(one, batch):
                break
            else:
                batch.append(self._waiting.popleft())
        return batch

    async def _in_thread(self, batch: Sequence[_Waiting]) -> list[list[RankedItem]]:
        loop = asyncio.get_running_loop()
        requests = [one.request for one in batch]
        return await loop.run_in_executor(self._thread, batch[0].model.rank, requests)


def _fits(one: _Waiting, batch: Sequence[_Waiting]) -> bool:
    """Whether a request can go with these."""
    deep = batch[0].request.n > DEEP
    return (
        one.model is batch[0].model
        and (one.request.n > DEEP) == deep
        and len(batch) < (MAX_DEEP_BATCH if deep else MAX_BATCH)
    )


def _set_result(one: _Waiting, ranked: list[RankedItem]) -> None:
    if not one.answer.done():
        one.answer.set_result(ranked)


def _set_exception(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
