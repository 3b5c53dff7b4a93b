"""The popularity list: what is served where nothing is known of the user, or there is no model."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from app.events.service import EventService

INCREMENT_SECONDS = 1.0
RECOUNT_SECONDS = 300.0
MANY = 50_000


class PopularList:
    """Items by the number of their users, most first.

    New events are counted in as they come (a user's second event on an item too, until the next
    recount): that is one short query at most once a second, and a recount a few times an hour.
    """

    def __init__(self, events: EventService) -> None:
        self._events = events
        self.counts = np.zeros(0, dtype=np.int64)
        """By internal id: the number of users, as far as it has been counted."""
        self._ranked = np.zeros(0, dtype=np.int64)
        self._seq = -1
        self.number = 0
        """Grows when the ranking changes."""
        self._counted_at = self._recounted_at = -float("inf")
        self._updating = asyncio.Lock()

    async def ranked(self, at_least: int) -> NDArray[np.int64]:
        """Internal ids of all items with events, most popular first, ties by id."""
        now = time.monotonic()
        if self._seq < at_least and now - self._counted_at >= INCREMENT_SECONDS:
            async with self._updating:
                if now - self._counted_at >= INCREMENT_SECONDS:
                    await self._update(at_least, now)
        return self._ranked

    async def _update(self, at_least: int, now: float) -> None:
        if now - self._recounted_at < RECOUNT_SECONDS:
            new = await self._events.new_events(self._seq, MANY)
            if len(new) < MANY:
                items = np.array([item for _, _, item in new], dtype=np.int64)
                seq = max(at_least, new[-1][0] if new else 0)
                self._set(_sum(self.counts, items, np.ones_like(items)), seq, now)
                return
        # The number first: what comes in meanwhile may be counted twice, but is never missed.
        seq = await self._events.last_seq()
        pairs = np.array(await self._events.popularity(), dtype=np.int64).reshape(-1, 2)
        self._set(_sum(np.zeros(0, np.int64), pairs[:, 0], pairs[:, 1]), seq, now)
        self._recounted_at = now

    def _set(self, counts: NDArray[np.int64], seq: int, now: float) -> None:
        self.counts, self._seq, self._counted_at = counts, seq, now
        order = np.argsort(-counts, kind="stable")
        ranked = order[: int((counts > 0).sum())]
        if not np.array_equal(ranked, self._ranked):
            self._ranked = ranked
            self.number += 1


def _sum(
    counts: NDArray[np.int64], items: NDArray[np.int64], n: NDArray[np.int64]
) -> NDArray[np.int64]:
    size = max(len(counts), int(items.max()) + 1 if len(items) else 0)
    total = np.zeros(size, dtype=np.int64)
    total[: len(counts)] = counts
    np.add.at(total, items, n)
    return total
