"""Counts of event rows by hour, verdict and name, added to a table every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

import sqlalchemy as sa

from app.core.bulk import insert_many
from app.core.database import Database
from app.core.ids import hour_now
from app.core.logging import get_logger
from app.events.tables import event_counts

log = get_logger(__name__)

Verdict = Literal["accepted", "duplicate", "rejected"]
WRITE_SECONDS = 5.0
CLOSE_SECONDS = 1.5
KEEP_HOURS = 24 * 90
MAX_NAMES = 50
"""The number of types and codes that a process counts by name in an hour. All others share one
name."""
OTHERS = "(others)"


class EventCount(NamedTuple):
    """The number of rows of an hour with one verdict and one name."""

    hour: int
    """Hours since 1970, UTC."""
    verdict: Verdict
    name: str
    """The type of accepted events or the code of rejected rows; empty for duplicates."""
    rows: int


class EventCounts:
    """Counts the rows of this process.

    A killed process loses the counts since the last write.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._new: Counter[tuple[int, Verdict, str]] = Counter()
        self._hour = -1
        self._names: set[tuple[Verdict, str]] = set()
        """The verdicts and names that the current hour counts apart."""
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    def add(self, verdict: Verdict, names: Mapping[str, int]) -> None:
        """Count rows by the name of their type or code."""
        hour = hour_now()
        if hour != self._hour:
            self._hour, self._names = hour, set()
        for name, rows in names.items():
            if len(self._names) < MAX_NAMES:
                self._names.add((verdict, name))
            counted = name if (verdict, name) in self._names else OTHERS
            self._new[hour, verdict, counted] += rows

    def start(self) -> None:
        """Start the task that writes the counts every ``WRITE_SECONDS``."""
        self._task = asyncio.create_task(self._write_on())

    async def close(self) -> None:
        """Write the remaining counts, if the database answers within ``CLOSE_SECONDS``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.write()

    async def write(self) -> None:
        """Add the counts to the table. After an error, the counts wait for the next call."""
        async with self._writing:
            if not self._new:
                return
            new, self._new = self._new, Counter()
            # In one order everywhere, so that servers that add at the same time do not deadlock.
            rows = [(*key, n) for key, n in sorted(new.items())]
            add = (
                "ON CONFLICT (hour, verdict, name) DO UPDATE "
                "SET rows = event_counts.rows + excluded.rows"
            )
            try:
                async with self._database.write() as conn:
                    await insert_many(conn, event_counts, EventCount._fields, rows, on_conflict=add)
            except BaseException:
                self._new.update(new)
                raise

    async def since(self, hour: int) -> list[EventCount]:
        """The counts of all servers from ``hour`` on (hours since 1970, UTC)."""
        await self.write()
        columns = [event_counts.c[name] for name in EventCount._fields]
        rows = await self._database.fetch(
            sa.select(*columns).where(event_counts.c.hour >= hour).order_by(event_counts.c.hour)
        )
        return [EventCount(*row) for row in rows]

    async def sums_since(self, hour: int) -> dict[Verdict, Counter[str]]:
        """The numbers of rows of all servers from ``hour`` on, by verdict and name."""
        await self.write()
        rows = await self._database.fetch(
            sa.select(event_counts.c.verdict, event_counts.c.name, sa.func.sum(event_counts.c.rows))
            .where(event_counts.c.hour >= hour)
            .group_by(event_counts.c.verdict, event_counts.c.name)
        )
        sums: dict[Verdict, Counter[str]] = {}
        for verdict, name, n in rows:
            sums.setdefault(verdict, Counter())[name] = int(n)
        return sums

    async def delete_old(self) -> None:
        """Delete the counts that are older than 90 days."""
        async with self._database.write() as conn:
            await conn.execute(
                event_counts.delete().where(event_counts.c.hour < hour_now() - KEEP_HOURS)
            )

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                await self.write()
            except Exception as error:
                log.warning("counts cannot be written yet", error=str(error).partition("\n")[0])
