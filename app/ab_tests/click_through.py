"""Click-through of versions: the share of their lists that were clicked."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from app.ab_tests.impressions import ImpressionBuffer
from app.ab_tests.repository import ABTestRepository
from app.core.database import Database
from app.core.recommendation_ids import hour_now
from app.events.click_attribution import ClickAttribution
from app.registry.schemas import ClickThrough


class ClickCounts(NamedTuple):
    """Lists that were served, and how many of them were clicked."""

    lists: int
    clicked: int

    def plus(self, other: ClickCounts) -> ClickCounts:
        """The sum of both."""
        return ClickCounts(self.lists + other.lists, self.clicked + other.clicked)


class ClickThroughStatistics:
    """Joins the lists that servers have counted with the clicks that events report."""

    def __init__(
        self, database: Database, attribution: ClickAttribution, impressions: ImpressionBuffer
    ) -> None:
        self._repository = ABTestRepository(database)
        self._attribution = attribution
        self._impressions = impressions

    async def total(self, version: str) -> ClickThrough:
        """The click-through of all lists of a version."""
        lists = await self._repository.count_lists(version)
        lists += self._impressions.unwritten_lists(version)
        clicked = await self._attribution.clicked(version)
        # Lists that a killed server had not written yet may have been clicked.
        rate = min(clicked / lists, 1.0) if lists else None
        return ClickThrough(lists=lists, clicked=clicked, rate=rate)

    async def by_hour(
        self, version: str, first: int, after: int, within: int | None = None
    ) -> dict[int, ClickCounts]:
        """Counts of the lists served in each hour that has any.

        Args:
            version: the version that served the lists.
            first: the first hour, in hours since 1970.
            after: the hour after the last one.
            within: leaves out clicks that came more than so many hours after the hour.
        """
        lists = await self._repository.lists_by_hour(version, first, after)
        clicked = await self._attribution.clicked_by_hour(version, sorted(lists), within)
        return {hour: ClickCounts(n, min(clicked.get(hour, 0), n)) for hour, n in lists.items()}

    async def last_day(self, version: str) -> ClickCounts:
        """Counts of the last 24 whole hours."""
        now = hour_now()
        hours = await self.by_hour(version, now - 24, now)
        return reduce(ClickCounts.plus, hours.values(), ClickCounts(0, 0))
