"""Lists for many users in one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import orjson

from app.core.errors import AppError, PayloadTooLarge, Unavailable, Unprocessable
from app.core.middleware import ConcurrencyLimiter
from app.core.requests import text_problem
from app.inference.batcher import IsGone
from app.inference.model_manager import ModelManager
from app.recommend.schemas import MAX_USERS, RecommendationQuery
from app.recommend.service import ContextLoader, RecommendService

MAX_ITEMS = 100_000  # of all lists together: 14 MB
MAX_BYTES = 64 * 2**20  # of an answer: items may be shown with their attributes
MAX_CONCURRENT_USERS = 32  # of all batches: half a pass is left for single requests
MAX_BATCHES = 16
TIMEOUT_SECONDS = 10.0
RETRY_SECONDS = 0.05


class BatchService:
    """Answers for many users, each with the list or the error of `RecommendService`."""

    def __init__(
        self, models: ModelManager, recommend: RecommendService, contexts: ContextLoader
    ) -> None:
        self._models = models
        self._contexts = contexts
        self._recommend = recommend
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_USERS)
        self._batches = ConcurrencyLimiter(
            MAX_BATCHES, "too many batches are in progress; retry later", retry_after=2
        )

    async def recommend(
        self, users: Sequence[str], query: RecommendationQuery, is_gone: IsGone | None = None
    ) -> bytes:
        """The body of the answer: a result for each of the users, in their order.

        Raises:
            PayloadTooLarge: there are too many users, items or bytes.
            Unavailable: too many batches are in progress.
            AppError: an error of all users alike, such as an unknown version.
        """
        if len(users) > MAX_USERS:
            raise PayloadTooLarge(
                f"a batch has at most {MAX_USERS:,} users, and this batch has {len(users):,}",
                code="too_many_users",
            )
        if len(users) * query.n > MAX_ITEMS:
            raise PayloadTooLarge(
                f"{len(users):,} lists of {query.n:,} are more than {MAX_ITEMS:,} items",
                code="too_many_items",
            )
        with self._batches.one():
            await self._models.get(query.model)
            await self._contexts.check(query)
            return b'{"results":[' + b",".join(await self._results(users, query, is_gone)) + b"]}"

    async def _results(
        self, users: Sequence[str], query: RecommendationQuery, is_gone: IsGone | None
    ) -> list[bytes]:
        results, n_bytes = [b""] * len(users), 0
        positions = iter(range(len(users)))
        until = time.monotonic() + TIMEOUT_SECONDS

        async def answer(positions: Iterator[int]) -> None:
            nonlocal n_bytes
            for position in positions:
                async with self._slots:
                    results[position] = await self._result(users[position], query, is_gone, until)
                n_bytes += len(results[position])
                if n_bytes > MAX_BYTES:
                    raise PayloadTooLarge(
                        f"the lists have more than {MAX_BYTES:,} bytes", code="too_many_items"
                    )
                # A list from the cache waits for nothing: other requests get their turn here.
                await asyncio.sleep(0)

        tasks = [
            asyncio.create_task(answer(positions))
            for _ in range(min(MAX_CONCURRENT_USERS, len(users)))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results

    async def _result(
        self, user: str, query: RecommendationQuery, is_gone: IsGone | None, until: float
    ) -> bytes:
        problem = text_problem(user)
        if problem is not None:
            return _error(Unprocessable(f"the user's id {problem}", code="invalid_id"))
        while True:
            try:
                answer = await self._recommend.recommend(user, query, is_gone)
                return b'{"status":200,' + answer[1:]
            except Unavailable as error:
                if error.code != "overloaded":
                    raise  # nobody waits for any of them any more, or the service stops
                if time.monotonic() > until:
                    return _error(error)
                await asyncio.sleep(RETRY_SECONDS)
            except AppError as error:
                return _error(error)


def _error(error: AppError) -> bytes:
    return orjson.dumps({"status": error.status, "code": error.code, "detail": error.detail})
