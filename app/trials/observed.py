"""What requests tell of trials and lists: kept in memory, written by and by."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NamedTuple

import orjson
from sqlalchemy.exc import IntegrityError

from app.core.attribution import hour_now
from app.core.database import Database
from app.core.metadata import now_us
from app.trials.repository import TrialRepository

MOST_WAITING = 20_000
"""Impressions in memory, of about a kilobyte each. Beyond it some are dropped and counted: an
answer never waits for them."""
GROUP_ROWS = 1_000


class Impression(NamedTuple):
    """An interleaved list that was given out, as it is written."""

    recommendation_id: str
    trial_id: str
    user_id: int | None
    teams: str
    created_at: int


class Observed:
    """Adds up in memory; `write` brings it into the database. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._repository = TrialRepository(database)
        self._served: Counter[tuple[str, int]] = Counter()
        self._sums: Counter[tuple[str, str]] = Counter()
        self._impressions: deque[Impression] = deque()
        self._writing = asyncio.Lock()
        self.lists: Counter[str] = Counter()
        """Lists given out since the process began, by version."""
        self.impressions = {"recorded": 0, "dropped": 0}
        """Interleaved lists given out since the process began, by what became of their record."""

    def served(self, version: str, n: int) -> None:
        self.lists[version] += n
        self._served[version, hour_now()] += n

    def sums(self, trial_id: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._sums[trial_id, name] += value  # type: ignore[assignment]

    def impression(
        self,
        recommendation_id: str,
        trial_id: str,
        user_id: int | None,
        team_a: list[int],
        team_b: list[int],
    ) -> None:
        if len(self._impressions) >= MOST_WAITING:
            self.impressions["dropped"] += 1
            return
        self.impressions["recorded"] += 1
        teams = orjson.dumps({"a": team_a, "b": team_b}).decode()
        self._impressions.append(Impression(recommendation_id, trial_id, user_id, teams, now_us()))

    def unwritten(self, version: str) -> int:
        """Lists of a version that the database does not know of yet."""
        return sum(n for (name, _), n in self._served.items() if name == version)

    async def write(self) -> None:
        """Writes everything that has been observed until now, also by a write under way."""
        await self.write_impressions()
        await self.write_counts()

    async def write_impressions(self) -> None:
        """Writes what waits, in groups. What cannot be written now waits on."""
        async with self._writing:
            await self._write_impressions()

    async def _write_impressions(self) -> None:
        while self._impressions:
            group = [self._impressions.popleft() for _ in range(min(GROUP_ROWS, self._waiting))]
            try:
                await self._write(group)
            except BaseException:
                self._impressions.extendleft(reversed(group))
                raise

    @property
    def _waiting(self) -> int:
        return len(self._impressions)

    async def _write(self, group: list[Impression]) -> None:
        try:
            await self._repository.add_impressions(group)
        except IntegrityError:
            # A user was erased meanwhile: that list goes with them, and not the others.
            for impression in group:
                try:
                    await self._repository.add_impressions([impression])
                except IntegrityError:
                    self.impressions["dropped"] += 1

    async def write_counts(self) -> None:
        """Adds what was counted. After an error it is added the next time."""
        async with self._writing:
            await self._write_counts()

    async def _write_counts(self) -> None:
        served, self._served = self._served, Counter()
        try:
            await self._repository.add_served(served)
        except BaseException:
            self._served.update(served)
            raise
        sums, self._sums = self._sums, Counter()
        try:
            await self._repository.add_sums(sums)
        except BaseException:
            self._sums.update(sums)
            raise
