"""Items by popularity: lists of newcomers, lists without a model, and backfill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.catalog.masks import MAX_INLINE_ITEMS
from app.core.errors import Unavailable
from app.core.logging import get_logger
from app.events.service import EventService
from app.recommend.context import RecommendationContext, allowed_items, internal_ids
from app.recommend.response import RankedList, popular_entry

log = get_logger(__name__)

INCREMENT_SECONDS = 1.0
RECOUNT_SECONDS = 300.0
START_SECONDS = 2.0  # that a start waits for the first count, at most
FIRST_COUNT_SECONDS = 10.0  # that a request waits for it, at most
RETRY_SECONDS = 10.0  # after a recount that failed
MAX_NEW_EVENTS = 50_000  # since the last count, beyond which everything is counted anew


class PopularityRanking:
    """Items by the number of their users, most first.

    The ranking adds each user's first positive event on an item, with one short query at most once
    a second. A recount reads all events: at the start, after ``MAX_NEW_EVENTS`` new events, and at
    most every 5 minutes if events were deleted. A task of its own recounts, and the ranking stays
    the same until the task ends.
    """

    def __init__(self, events: EventService) -> None:
        self._events = events
        self.counts = np.zeros(0, dtype=np.int64)
        """The number of users by internal id, as of the last count."""
        self._ranked = np.zeros(0, dtype=np.int64)
        self._seq = -1
        self.number = 0
        """Grows when the ranking changes."""
        self.counts_number = 0
        """Grows when a count changes: orders with boosts depend on the counts."""
        self._counted_at = self._recounted_at = -float("inf")
        self._recounted_seq = -1
        self._updating = asyncio.Lock()
        self._recount: asyncio.Task[None] | None = None

    async def ranked(self, at_least: int) -> NDArray[np.int64]:
        """Internal ids of all items with events, most popular first, ties by id.

        Raises:
            Unavailable: The first count takes longer than ``FIRST_COUNT_SECONDS``.
        """
        if first := self._first_count():
            await asyncio.wait({first}, timeout=FIRST_COUNT_SECONDS)
            if self._recounted_seq < 0:
                raise Unavailable(
                    "the server still counts the users of items; retry later", code="not_ready"
                )
        now = time.monotonic()
        if self._seq < at_least and self._is_due(now):
            async with self._updating:
                if self._is_due(now):
                    await self._update(at_least, now)
        return self._ranked

    async def start(self, seconds: float = START_SECONDS) -> None:
        """Count all events, and return after the count, or after ``seconds``.

        The service is not ready before the first count, so that no request waits for the count.
        """
        self._recount = asyncio.create_task(self._recount_aside(time.monotonic()))
        await asyncio.wait({self._recount}, timeout=seconds)

    async def ready(self) -> str | None:
        """The reason why this server is not ready for requests; None after the first count."""
        return (
            "the server still counts the users of items; retry later"
            if self._first_count()
            else None
        )

    async def stop(self) -> None:
        """End a recount in progress."""
        if self._recount is not None:
            self._recount.cancel()
            await asyncio.wait({self._recount})

    def _first_count(self) -> asyncio.Task[None] | None:
        return self._recount if self._recounted_seq < 0 else None

    def _is_due(self, now: float) -> bool:
        waited = now - self._counted_at >= INCREMENT_SECONDS
        return self._recount is None and (waited or len(self._ranked) == 0)

    async def _update(self, at_least: int, now: float) -> None:
        if self._recounted_seq >= 0 and not await self._is_outdated(now):
            new = await self._events.new_adoptions(self._seq, MAX_NEW_EVENTS)
            if len(new) < MAX_NEW_EVENTS:
                items = np.array([item for _, item, is_first in new if is_first], dtype=np.int64)
                seq = max(at_least, new[-1][0] if new else 0)
                self._set(_sum(self.counts, items, np.ones_like(items)), seq, now)
                return
        if len(self._ranked) == 0:  # there is nothing to answer with meanwhile
            await self._count_all(now)
            return
        self._recount = asyncio.create_task(self._recount_aside(now))

    async def _is_outdated(self, now: float) -> bool:
        """Whether a counted event was deleted, looked up at most every ``RECOUNT_SECONDS``."""
        if now - self._recounted_at < RECOUNT_SECONDS:
            return False
        self._recounted_at = now
        return await self._events.is_retracted_since(self._recounted_seq)

    async def _recount_aside(self, now: float) -> None:
        try:
            while True:
                try:
                    await self._count_all(now)
                    return
                except Exception as error:
                    log.warning(
                        "the recount of popularity failed", error=str(error).partition("\n")[0]
                    )
                if self._recounted_seq >= 0:  # there is a ranking to answer with meanwhile
                    self._counted_at = time.monotonic() + RETRY_SECONDS
                    return
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._recount = None

    async def _count_all(self, now: float) -> None:
        seq, rows = await self._events.popularity()
        pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
        self._set(_sum(np.zeros(0, np.int64), pairs[:, 0], pairs[:, 1]), seq, now)
        self._recounted_at, self._recounted_seq = now, seq

    def _set(self, counts: NDArray[np.int64], seq: int, now: float) -> None:
        if not np.array_equal(counts, self.counts):
            self.counts_number += 1
        self.counts, self._seq, self._counted_at = counts, seq, now
        order = np.argsort(-counts, kind="stable")
        ranked = order[: int((counts > 0).sum())]
        if not np.array_equal(ranked, self._ranked):
            self._ranked = ranked
            self.number += 1


async def boosted(
    context: RecommendationContext, popularity: PopularityRanking, popular: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Popular items in the order of the context's boosts; without boosts, unchanged.

    The log-odds of an item are log(users + 1) plus the boosts. The order includes items without
    users. Of equal items, the more popular item comes first, then the newer item.
    """
    selection = context.selection
    if selection is None or selection.boosts is None:
        return popular
    boosts, size, counts = selection.boosts, context.catalogue.size, popularity.counts

    def order() -> NDArray[np.int64]:
        users = np.zeros(size, dtype=np.int64)
        users[: min(size, len(counts))] = counts[:size]
        place = np.arange(size + len(popular), len(popular), -1)
        known = popular[popular < size]
        place[known] = np.arange(len(known))
        return np.lexsort((place, -(np.log1p(users) + boosts.of(size))))

    return await (asyncio.to_thread(order) if size > MAX_INLINE_ITEMS else _at_once(order))


async def _at_once(make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    return make()


def _sum(
    counts: NDArray[np.int64], items: NDArray[np.int64], n: NDArray[np.int64]
) -> NDArray[np.int64]:
    size = max(len(counts), int(items.max()) + 1 if len(items) else 0)
    total = np.zeros(size, dtype=np.int64)
    total[: len(counts)] = counts
    np.add.at(total, items, n)
    return total


def backfill(
    context: RecommendationContext, popular: NDArray[np.int64], ranked: RankedList
) -> RankedList:
    """The items of `most_popular` that fill a list up to the query's ``n``."""
    allowed = backfill_items(context)
    allowed[list(ranked.ids)] = False
    chosen = most_popular(popular, allowed, context.query.n - len(ranked.ids))
    catalogue, explain = context.catalogue, context.query.explain
    entries = [
        popular_entry(catalogue.external_ids[item], catalogue.titles[item], rank, explain)
        for rank, item in enumerate(chosen, len(ranked.ids) + 1)
    ]
    return RankedList.of(entries, chosen)


def backfill_items(context: RecommendationContext) -> NDArray[np.bool_]:
    """(size,) by internal id: whether an item is allowed and not excluded by the query."""
    allowed = allowed_items(context)
    allowed[internal_ids(context.catalogue, context.query.exclude)] = False
    return allowed


def most_popular(popular: NDArray[np.int64], allowed: NDArray[np.bool_], n: int) -> list[int]:
    """The ``n`` most popular allowed items, then items without users, newest first."""
    popular = popular[popular < len(allowed)]
    chosen = popular[allowed[popular]][:n]
    if len(chosen) < n:
        rest = allowed.copy()
        rest[popular] = False
        chosen = np.concatenate([chosen, np.flatnonzero(rest)[::-1][: n - len(chosen)]])
    items: list[int] = chosen.tolist()
    return items
