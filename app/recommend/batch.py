"""Lists for many users in one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import orjson

from app.core.errors import AppError, PayloadTooLarge, Unavailable, Unprocessable
from app.core.http import text_problem
from app.core.overload import Places
from app.recommend.batcher import IsGone
from app.recommend.filters import Filters
from app.recommend.service import RecommendService
from app.recommend.sources import Sources

MOST_USERS = 1_000
MOST_ITEMS = 100_000  # of all lists together: 14 MB
AT_ONCE = 32  # users of all batches: half a pass of the ranker is left for single requests
MOST_BATCHES = 16
PATIENCE_SECONDS = 10.0
PAUSE_SECONDS = 0.05


class BatchService:
    """Every user's list is what `RecommendService` would answer, and so is every refusal."""

    def __init__(self, sources: Sources, recommend: RecommendService) -> None:
        self._sources = sources
        self._recommend = recommend
        self._places = asyncio.Semaphore(AT_ONCE)
        self._batches = Places(MOST_BATCHES, "many batches are under way", retry_after=2)

    async def recommend(
        self, users: Sequence[str], filters: Filters, gone: IsGone | None = None
    ) -> bytes:
        """The body of the answer: a result for each of the users, in their order.

        Raises PayloadTooLarge for too many, Unavailable where many batches are under way, and what
        is wrong with all of them alike, as a version that there is not.
        """
        if len(users) > MOST_USERS:
            raise PayloadTooLarge(
                f"at most {MOST_USERS:,} users are taken, these are {len(users):,}",
                code="too_many_users",
            )
        if len(users) * filters.n > MOST_ITEMS:
            raise PayloadTooLarge(
                f"{len(users):,} lists of {filters.n:,} are more than {MOST_ITEMS:,} items",
                code="too_many_items",
            )
        with self._batches.one():
            await self._sources.model(filters.model)
            return b'{"results":[' + b",".join(await self._results(users, filters, gone)) + b"]}"

    async def _results(
        self, users: Sequence[str], filters: Filters, gone: IsGone | None
    ) -> list[bytes]:
        results = [b""] * len(users)
        todo = iter(range(len(users)))
        until = time.monotonic() + PATIENCE_SECONDS

        async def work(todo: Iterator[int]) -> None:
            for at in todo:
                async with self._places:
                    results[at] = await self._result(users[at], filters, gone, until)
                # A list from the cache waits for nothing: others are to have their turn.
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(work(todo)) for _ in range(min(AT_ONCE, len(users)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results

    async def _result(
        self, user: str, filters: Filters, gone: IsGone | None, until: float
    ) -> bytes:
        problem = text_problem(user)
        if problem is not None:
            return _refused(Unprocessable(f"the user's id {problem}", code="invalid_id"))
        while True:
            try:
                answer = await self._recommend.recommend(user, filters, gone)
                return b'{"status":200,' + answer[1:]
            except Unavailable as error:
                if error.code != "overloaded":
                    raise  # nobody waits for any of them any more, or the service stops
                if time.monotonic() > until:
                    return _refused(error)
                await asyncio.sleep(PAUSE_SECONDS)
            except AppError as error:
                return _refused(error)


def _refused(error: AppError) -> bytes:
    return orjson.dumps({"status": error.status, "code": error.code, "detail": error.detail})
