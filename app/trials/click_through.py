"""How many of a version's lists were clicked."""

from __future__ import annotations

from typing import Any, NamedTuple

from app.core.attribution import hour_now
from app.events.attribution import Attribution
from app.trials.observed import Observed
from app.trials.repository import TrialRepository


class Clicks(NamedTuple):
    """Lists that were given out, and how many of them were clicked."""

    lists: int
    clicked: int

    def and_(self, other: Clicks) -> Clicks:
        """Both together."""
        return Clicks(self.lists + other.lists, self.clicked + other.clicked)


class ClickThrough:
    """Lists as servers have counted them, and clicks as events tell of them."""

    def __init__(
        self, repository: TrialRepository, attribution: Attribution, observed: Observed
    ) -> None:
        self._repository = repository
        self._attribution = attribution
        self._observed = observed

    async def of(self, version: str) -> dict[str, Any]:
        """Of all lists of a version, for JSON."""
        lists = await self._repository.lists(version) + self._observed.unwritten(version)
        clicked = await self._attribution.clicked(version)
        return {
            "lists": lists,
            "clicked": clicked,
            # What a server that was killed had not written yet may have been clicked.
            "rate": min(clicked / lists, 1.0) if lists else None,
        }

    async def by_hour(
        self, version: str, first: int, after: int, within: int | None = None
    ) -> dict[int, Clicks]:
        """Of the lists of each hour with any, from one hour to before another. Clicks that came
        later than ``within`` hours after the hour are left out.
        """
        lists = await self._repository.lists_by_hour(version, first, after)
        clicked = await self._attribution.clicked_by_hour(version, sorted(lists), within)
        return {hour: Clicks(n, min(clicked.get(hour, 0), n)) for hour, n in lists.items()}

    async def last_day(self, version: str) -> Clicks:
        """Of the last 24 whole hours."""
        now = hour_now()
        hours = await self.by_hour(version, now - 24, now)
        total = Clicks(0, 0)
        for each in hours.values():
            total = total.and_(each)
        return total
