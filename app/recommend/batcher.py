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
MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class _Waiting:
    model: ServingModel
    request: RankRequest
    answer: asyncio.Future[list[RankedItem]]


class Batcher:
    """Ranks as soon as the thread is free; while it is busy, requests collect.

    A request that has gone away is dropped before it is ranked. A batch holds requests of one
    model only. What goes wrong in a batch of several is tried again one by one, so that it fails
    only the request that it belongs to.
    """

    def __init__(self, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, "ncr-inference", torch.set_num_threads, (threads,))
        self._waiting: deque[_Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def rank(self, model: ServingModel, request: RankRequest) -> list[RankedItem]:
        """The ranked list. Raises Unavailable when too many are waiting already."""
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("too many requests are waiting to be ranked", code="overloaded")
        answer: asyncio.Future[list[RankedItem]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(model, request, answer))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await answer

    async def close(self) -> None:
        """Ends the thread after what it is doing."""
        if self._runner is not None:
            await asyncio.wait({self._runner})
        await asyncio.to_thread(self._thread.shutdown)

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
        while self._waiting and len(batch) < MAX_BATCH:
            if self._waiting[0].answer.done():  # gone away
                self._waiting.popleft()
            elif batch and self._waiting[0].model is not batch[0].model:
                break
            else:
                batch.append(self._waiting.popleft())
        return batch

    async def _in_thread(self, batch: Sequence[_Waiting]) -> list[list[RankedItem]]:
        loop = asyncio.get_running_loop()
        requests = [one.request for one in batch]
        return await loop.run_in_executor(self._thread, batch[0].model.rank, requests)


def _set_result(one: _Waiting, ranked: list[RankedItem]) -> None:
    if not one.answer.done():
        one.answer.set_result(ranked)


def _set_exception(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
