"""The buffer of what requests report about trials and served lists."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import orjson
from sqlalchemy.exc import IntegrityError

from app.ab_tests.repository import ABTestRepository
from app.core.database import Database
from app.core.recommendation_ids import hour_now
from app.core.tables import now_us

MAX_IMPRESSIONS = 20_000
"""Impressions in memory, of about a kilobyte each. More are dropped and counted, because a response
never waits for them."""
GROUP_ROWS = 1_000


class Impression(NamedTuple):
    """The row of an interleaved list that was served."""

    recommendation_id: str
    trial_id: str
    user_id: int | None
    teams: str
    """JSON."""
    created_at: int


class ImpressionBuffer:
    """Counts in memory what `write` adds to the database. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._repository = ABTestRepository(database)
        self._new_lists: Counter[tuple[str, int]] = Counter()
        self._new_sums: Counter[tuple[str, str]] = Counter()
        self._impressions: deque[Impression] = deque()
        self._writing = asyncio.Lock()
        self.lists: Counter[str] = Counter()
        """Lists served since the process began, by version."""
        self.impressions = {"recorded": 0, "dropped": 0}
        """Interleaved lists served since the process began, by what became of their record."""

    def add_lists(self, version: str, n: int = 1) -> None:
        """Counts lists that a version served."""
        self.lists[version] += n
        self._new_lists[version, hour_now()] += n

    def add_sums(self, trial_id: str, values: Mapping[str, float]) -> None:
        """Adds to the sums of a trial."""
        for name, value in values.items():
            self._new_sums[trial_id, name] += value  # type: ignore[assignment]

    def add_impression(
        self,
        recommendation_id: str,
        trial_id: str,
        user_id: int | None,
        team_a: Sequence[int],
        team_b: Sequence[int],
    ) -> None:
        """Records an interleaved list; drops it if too many wait to be written."""
        if len(self._impressions) >= MAX_IMPRESSIONS:
            self.impressions["dropped"] += 1
            return
        self.impressions["recorded"] += 1
        teams = orjson.dumps({"a": list(team_a), "b": list(team_b)}).decode()
        self._impressions.append(Impression(recommendation_id, trial_id, user_id, teams, now_us()))

    def unwritten_lists(self, version: str) -> int:
        """Lists of a version that are not in the database yet."""
        return sum(n for (name, _), n in self._new_lists.items() if name == version)

    async def write(self) -> None:
        """Writes everything reported until now, and waits for a write in progress."""
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
        """Writes the counts. After an error they are added by the next call."""
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
