"""Lists of all users for exports, as the service would answer now with one model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from app.core.errors import Unavailable
from app.inference.loaded_model import LoadedModel
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList
from app.recommend.schemas import RecommendationQuery
from app.recommend.service import ContextLoader
from ncr_core.errors import CheckpointError

CONCURRENT_USERS = 128  # two passes: one is ranked while the profiles of the next are read
RETRY_SECONDS = 0.05
MAX_WAIT_SECONDS = 3_600.0  # for a list, as while popular items are counted for the first time


class BulkLists:
    """Builds the lists of many users with one model, regardless of activations meanwhile.

    The lists take no part in trials, because no user requested them.

    Args:
        contexts: looks up the context of a list.
        lists: builds the list.
        model: ranks the items; None for popular items.
    """

    def __init__(
        self, contexts: ContextLoader, lists: ListBuilder, model: LoadedModel | None
    ) -> None:
        self._contexts = contexts
        self._lists = lists
        self._model = model
        self.version = None if model is None else model.version

    async def build(self, users: Sequence[str], query: RecommendationQuery) -> list[RankedList]:
        """The list of each of the users, in their order."""
        results: list[RankedList | None] = [None] * len(users)
        positions = iter(range(len(users)))

        async def work(positions: Iterator[int]) -> None:
            for position in positions:
                results[position] = await self._build(users[position], query)

        n = min(CONCURRENT_USERS, len(users))
        tasks = [asyncio.create_task(work(positions)) for _ in range(n)]
        try:
            # Not a group of tasks: its errors would come in a group, and nobody tries those again.
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [ranked for ranked in results if ranked is not None]

    async def _build(self, user: str, query: RecommendationQuery) -> RankedList:
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while True:
            context = await self._contexts.load(user, query)
            try:
                return await self._lists.build(context, self._model)
            except Unavailable as error:
                if error.code not in ("overloaded", "not_ready"):
                    raise
                if time.monotonic() > deadline:
                    raise CheckpointError(f"lists cannot be made: {error.detail}") from None
                await asyncio.sleep(RETRY_SECONDS)
