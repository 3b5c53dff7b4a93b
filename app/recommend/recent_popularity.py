"""Popular items of all time or of a window, and trending items."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from app.catalog.filters import AttributeFilter
from app.catalog.service import MAX_INLINE_ITEMS, CatalogService
from app.catalog.snapshot import Catalogue
from app.core.errors import Unavailable
from app.core.logging import get_logger
from app.core.tables import now_us
from app.events.service import EventService
from app.recommend.cursor import MAX_PLACES, ListCursor, decode
from app.recommend.frozen_lists import FrozenCounts, FrozenLists
from app.recommend.popularity import PopularityRanking
from app.recommend.schemas import (
    PopularItem,
    PopularItems,
    RecommendationQuery,
    TrendingItem,
    TrendingItems,
)

log = get_logger(__name__)

MIN_REFRESH_SECONDS = 30.0
REFRESH_SHARE = 0.05  # of the time, at most, that a window is being counted
FIRST_COUNT_SECONDS = 10.0  # that a request waits for the first count of its window
COUNT_BYTES = 2**27  # for counts; those of a window that are larger are kept alone
HOUR_US = 3_600 * 1_000_000
SUBJECT = b"\xff"  # of cursors, before the list's name: no user's or item's subject begins so
RISING = "trending "
WINDOW = r"^(?:(?:[1-9]|1[0-9]|2[0-4])h|(?:[1-9]|[12][0-9]|30)d)$"
"""Windows: 1h to 24h and 1d to 30d."""


def hours_of(window: str) -> int:
    """Return the hours of a window such as 6h or 7d."""
    number, unit = re.findall(r"\d+|[hd]", window)
    return int(number) * (24 if unit == "d" else 1)


@dataclass(frozen=True, slots=True)
class _Counts:
    ranked: NDArray[np.int64]
    """(n,) internal ids, best first."""
    users: NDArray[np.int64]
    """(n,) the number of users of each item in the window."""
    before: NDArray[np.int64]
    """(n,) the number of users in the window before; zeros in counts of popular items."""
    counted_at: float
    keep_seconds: float


class _Page(NamedTuple):
    rows: list[tuple[int, str, str | None, int, int]]
    """Rank, client's id, title, users, and users before."""
    following: str | None
    """The cursor of the next page."""


class RecentPopularity:
    """Lists of popular and trending items.

    A background task counts the users of a window when a request needs the count, one window at a
    time. A recount follows after 30 s or later, so that the counts of a window take at most 5 % of
    the time. Meanwhile the previous counts serve. Hidden items leave the lists at once.
    """

    def __init__(
        self,
        events: EventService,
        catalog: CatalogService,
        popularity: PopularityRanking,
        frozen: FrozenLists[FrozenCounts],
    ) -> None:
        self._events = events
        self._catalog = catalog
        self._popularity = popularity
        self._frozen = frozen
        self._counts: LRUCache[tuple[int, bool], _Counts] = LRUCache(
            COUNT_BYTES, lambda counts: min(COUNT_BYTES, 500 + 24 * len(counts.ranked))
        )
        self._tasks: dict[tuple[int, bool], asyncio.Task[None]] = {}
        self._one = asyncio.Lock()

    async def popular(
        self,
        n: int,
        categories: Sequence[str],
        window: str | None = None,
        wanted: AttributeFilter | None = None,
        text: str | None = None,
    ) -> PopularItems:
        """Return the visible items with the most users, in a window or of all time.

        Args:
            n: the maximum number of items.
            categories: the list has items in any of these; empty for all items.
            window: such as 6h or 7d; None for all time.
            wanted: the filter on the items' attributes; None for all items.
            text: the cursor of the page before; None for the first page.

        Raises:
            Unavailable: the first count takes longer than ``FIRST_COUNT_SECONDS``, or attributes
                that the filter names are still being read.
            Unprocessable: the filter does not fit the attributes; or ``invalid_cursor``: the cursor
                is not from this list, or is too old.
        """
        page = await self._page(f"popular {window}", n, categories, window, wanted, text)
        return PopularItems(
            window=window,
            items=[
                PopularItem(id=item, title=title, rank=rank, users=users)
                for rank, item, title, users, _ in page.rows
            ],
            next_cursor=page.following,
        )

    async def trending(
        self,
        n: int,
        categories: Sequence[str],
        window: str,
        wanted: AttributeFilter | None = None,
        text: str | None = None,
    ) -> TrendingItems:
        """Return the visible items with the most significant rise of users since the window before.

        Arguments and errors as for `popular`.
        """
        page = await self._page(RISING + window, n, categories, window, wanted, text)
        return TrendingItems(
            window=window,
            items=[
                TrendingItem(id=item, title=title, rank=rank, users=users, users_before=before)
                for rank, item, title, users, before in page.rows
            ],
            next_cursor=page.following,
        )

    async def _page(
        self,
        name: str,
        n: int,
        categories: Sequence[str],
        window: str | None,
        wanted: AttributeFilter | None,
        text: str | None,
    ) -> _Page:
        """The places after a cursor.

        The second page freezes the list, so that the order stays the same.
        """
        query = RecommendationQuery(n, categories=tuple(sorted({*categories})), filter=wanted)
        subject, digest = SUBJECT + name.encode(), query.list_digest
        cursor = None if text is None else decode(text, subject, digest)
        catalogue = await self._catalog.catalogue()
        mask = None
        if wanted is not None:
            loaded = await self._catalog.with_attributes(catalogue, wanted.names)
            mask = await self._catalog.mask(wanted, loaded)

        async def make(places: int = MAX_PLACES) -> FrozenCounts:
            allowed = catalogue.visible
            if mask is not None:
                allowed = allowed & mask.of(catalogue.size)
            rising = name.startswith(RISING)
            return await self._counted_items(catalogue, window, rising, allowed, categories, places)

        if cursor is None:
            cursor = ListCursor(None, 0, int(time.time()), np.zeros(0, dtype=np.int64))
            counts = await make(n + 1)  # with one more it shows whether something follows
            places = np.arange(len(counts.ids))
        else:
            counts = await self._frozen.get(cursor.list_key(subject, digest), make)
            left = counts.ids < catalogue.size
            left[left] = catalogue.visible[counts.ids[left]]
            if mask is not None:
                left[left] = mask.of(catalogue.size)[counts.ids[left]]
            places = np.flatnonzero(left & ~np.isin(counts.ids, cursor.shown))
        shown = len(cursor.shown)
        n = min(n, MAX_PLACES - shown)
        page, following = places[:n], None
        if len(places) > n and shown + n < MAX_PLACES:
            following = cursor.after(counts.ids[page].tolist()).encode(subject, digest)
        columns = (column[page].tolist() for column in (counts.ids, counts.users, counts.before))
        rows = [
            (rank, catalogue.external_ids[item], catalogue.titles[item], users, before)
            for rank, (item, users, before) in enumerate(zip(*columns, strict=True), shown + 1)
        ]
        return _Page(rows, following)

    async def _counted_items(
        self,
        catalogue: Catalogue,
        window: str | None,
        rising: bool,
        allowed: NDArray[np.bool_],
        categories: Sequence[str],
        n: int,
    ) -> FrozenCounts:
        """The first ``n`` allowed items by the current counts."""
        if window is None:
            ranked = await self._popularity.ranked(await self._events.last_seq())
            by_item = self._popularity.counts
            places = await self._places(catalogue, ranked, categories, allowed, n)
            ids = ranked[places]
            return FrozenCounts(ids, by_item[ids], np.zeros_like(ids))
        counts = await self._counted(hours_of(window), rising=rising)
        places = await self._places(catalogue, counts.ranked, categories, allowed, n)
        return FrozenCounts(counts.ranked[places], counts.users[places], counts.before[places])

    async def stop(self) -> None:
        """End the counts in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _places(
        self,
        catalogue: Catalogue,
        ranked: NDArray[np.int64],
        categories: Sequence[str],
        allowed: NDArray[np.bool_],
        n: int,
    ) -> list[int]:
        """Return the positions of the first ``n`` ranked items that may be shown."""
        if catalogue.size > MAX_INLINE_ITEMS:
            return await asyncio.to_thread(_find_places, catalogue, ranked, allowed, categories, n)
        return _find_places(catalogue, ranked, allowed, categories, n)

    async def _counted(self, hours: int, *, rising: bool) -> _Counts:
        key = (hours, rising)
        counts = self._counts.get(key)
        is_due = counts is None or time.monotonic() > counts.counted_at + counts.keep_seconds
        if is_due and key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._count_aside(key))
        if counts is None:
            await asyncio.wait({self._tasks[key]}, timeout=FIRST_COUNT_SECONDS)
            counts = self._counts.get(key)
            if counts is None:
                raise Unavailable(
                    "the server still counts the users of items; retry later", code="not_ready"
                )
        return counts

    async def _count_aside(self, key: tuple[int, bool]) -> None:
        try:
            async with self._one:
                self._counts[key] = await self._count(*key)
        except Exception as error:
            log.warning("the count of a window failed", error=str(error).partition("\n")[0])
            await asyncio.sleep(1)  # before it is tried again
        finally:
            del self._tasks[key]

    async def _count(self, hours: int, rising: bool) -> _Counts:
        began = time.monotonic()
        until = now_us() + 1
        split = until - hours * HOUR_US
        since = split - hours * HOUR_US if rising else split
        rows = await self._events.users_by_item(since, split, until)
        items, users, before = await asyncio.to_thread(_ranked, rows, rising)
        now = time.monotonic()
        keep = max(MIN_REFRESH_SECONDS, (now - began) / REFRESH_SHARE)
        return _Counts(items, users, before, now, keep)


def _ranked(
    rows: Sequence[tuple[int, int, int]], rising: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Items, their numbers of users, and their numbers of users before, best first, each (n,).

    The result leaves out items without users or, if ``rising``, without a rise.
    """
    items, users, before = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    if rising:
        # As a difference of two Poisson counts: a rise from 50 to 100 is more than one to 3.
        score = (users - before) / np.sqrt(np.maximum(1, users + before))
    else:
        score = users.astype(np.float64)
    order = np.lexsort((items, -users, -score))
    order = order[score[order] > 0]
    return items[order], users[order], before[order]


def _find_places(
    catalogue: Catalogue,
    ranked: NDArray[np.int64],
    allowed: NDArray[np.bool_],
    categories: Sequence[str],
    n: int,
) -> list[int]:
    if categories:
        allowed = allowed & catalogue.mask(categories)
    known = np.flatnonzero(ranked < catalogue.size)
    places: list[int] = known[allowed[ranked[known]]][:n].tolist()
    return places
