"""Served lists: the buffer that counts them, and their click-through."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import orjson
from sqlalchemy.exc import IntegrityError

from app.ab_tests.assignment import user_number
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import Arm
from app.core.database import Database
from app.core.ids import hour_now
from app.core.tables import now_us
from app.events.click_attribution import ClickAttribution
from app.registry.schemas import ClickThrough

MAX_IMPRESSIONS = 20_000
"""The largest number of impressions in memory, of about 1 kB each. Further impressions are dropped
and counted, because a response never waits for a write."""
MAX_TRIAL_USERS = 200_000
"""The largest number of users of settings trials whose new lists are in memory. The lists of
further users are dropped."""
GROUP_ROWS = 1_000


class Impression(NamedTuple):
    """The row of a served interleaved list."""

    recommendation_id: str
    trial_id: str
    user_id: int | None
    teams: str
    """Internal item ids by version (``a`` and ``b``), as JSON."""
    created_at: int


class ImpressionBuffer:
    """Counts served lists in memory, for `write` to add to the database.

    A buffer belongs to one event loop.
    """

    def __init__(self, database: Database) -> None:
        self._repository = ABTestRepository(database)
        self._new_lists: Counter[tuple[str, int]] = Counter()
        self._new_sums: Counter[tuple[str, str]] = Counter()
        self._new_trial_lists: Counter[tuple[str, str, int]] = Counter()
        self._impressions: deque[Impression] = deque()
        self._writing = asyncio.Lock()
        self.lists: Counter[str] = Counter()
        """Lists served since the process began, by version."""
        self.impressions = {"recorded": 0, "dropped": 0}
        """Interleaved lists served since the process began, by the outcome of their record. Lists
        of settings trials count only as dropped."""

    def add_lists(self, version: str, n: int = 1) -> None:
        """Counts lists that a version served."""
        self.lists[version] += n
        self._new_lists[version, hour_now()] += n

    def add_sums(self, trial_id: str, values: Mapping[str, float]) -> None:
        """Adds to the sums of a trial."""
        for name, value in values.items():
            self._new_sums[trial_id, name] += value  # type: ignore[assignment]

    def add_trial_list(self, trial_id: str, arm: Arm, user_number: int) -> None:
        """Counts a list of a user in an arm of a settings trial."""
        key = trial_id, arm, user_number
        if len(self._new_trial_lists) >= MAX_TRIAL_USERS and key not in self._new_trial_lists:
            self.impressions["dropped"] += 1
            return
        self._new_trial_lists[key] += 1

    def forget(self, user: str) -> int:
        """Drops the counts of a user that are not written yet; returns their number."""
        trials = {trial_id for trial_id, _, _ in self._new_trial_lists}
        numbers = {trial_id: user_number(trial_id, user) for trial_id in trials}
        own = [key for key in self._new_trial_lists if key[2] == numbers[key[0]]]
        for key in own:
            del self._new_trial_lists[key]
        return len(own)

    def add_impression(
        self,
        recommendation_id: str,
        trial_id: str,
        user_id: int | None,
        team_a: Sequence[int],
        team_b: Sequence[int],
    ) -> None:
        """Records an interleaved list, or drops the list if too many lists wait."""
        if len(self._impressions) >= MAX_IMPRESSIONS:
            self.impressions["dropped"] += 1
            return
        self.impressions["recorded"] += 1
        teams = orjson.dumps({"a": list(team_a), "b": list(team_b)}).decode()
        self._impressions.append(Impression(recommendation_id, trial_id, user_id, teams, now_us()))

    def unwritten_lists(self, version: str) -> int:
        """The number of lists of a version that are not in the database yet."""
        return sum(n for (name, _), n in self._new_lists.items() if name == version)

    async def write(self) -> None:
        """Writes all impressions and counts, and waits for a write in progress."""
        await self.write_impressions()
        await self.write_counts()

    async def write_impressions(self) -> None:
        """Writes the impressions in groups. After an error the rest waits for the next call."""
        async with self._writing:
            while self._impressions:
                size = min(GROUP_ROWS, len(self._impressions))
                group = [self._impressions.popleft() for _ in range(size)]
                try:
                    await self._write_group(group)
                except BaseException:
                    self._impressions.extendleft(reversed(group))
                    raise

    async def _write_group(self, group: list[Impression]) -> None:
        try:
            await self._repository.add_impressions(group)
        except IntegrityError:
            # A user was erased meanwhile: only that user's lists are dropped.
            for impression in group:
                try:
                    await self._repository.add_impressions([impression])
                except IntegrityError:
                    self.impressions["dropped"] += 1

    async def write_counts(self) -> None:
        """Writes the counts. After an error, the counts wait for the next call."""
        async with self._writing:
            trial_lists, self._new_trial_lists = self._new_trial_lists, Counter()
            try:
                await self._repository.add_trial_lists(trial_lists)
            except BaseException:
                self._new_trial_lists.update(trial_lists)
                raise
        async with self._writing:
            lists, self._new_lists = self._new_lists, Counter()
            try:
                await self._repository.add_lists(lists)
            except BaseException:
                self._new_lists.update(lists)
                raise
            sums, self._new_sums = self._new_sums, Counter()
            try:
                await self._repository.add_sums(sums)
            except BaseException:
                self._new_sums.update(sums)
                raise


class ClickCounts(NamedTuple):
    """The number of served lists, and the number of clicked lists among them."""

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
        """The counts of served lists by hour, for hours with lists.

        Args:
            version: the version that served the lists.
            first: the first hour, in hours since 1970.
            after: the hour after the last one.
            within: the number of hours, after the end of a list's hour, in which clicks count;
                None: clicks count at any time.
        """
        lists = await self._repository.lists_by_hour(version, first, after)
        clicked = await self._attribution.clicked_by_hour(version, sorted(lists), within)
        return {hour: ClickCounts(n, min(clicked.get(hour, 0), n)) for hour, n in lists.items()}

    async def of_all_by_hour(self, first: int, after: int) -> dict[int, ClickCounts]:
        """The counts of served lists of all versions together, see `by_hour`."""
        total: dict[int, ClickCounts] = {}
        for version in await self._repository.versions_with_lists(first, after):
            for hour, counts in (await self.by_hour(version, first, after)).items():
                total[hour] = total.get(hour, ClickCounts(0, 0)).plus(counts)
        return total

    async def last_day(self, version: str) -> ClickCounts:
        """The counts of a version's lists in the last 24 whole hours."""
        now = hour_now()
        hours = await self.by_hour(version, now - 24, now)
        return reduce(ClickCounts.plus, hours.values(), ClickCounts(0, 0))
