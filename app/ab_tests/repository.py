"""Queries on trials, impressions and served lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ab_tests.schemas import ABTestRow, RunningABTest
from app.ab_tests.tables import impressions, served_lists, trial_sums, trials
from app.core.bulk import insert_many, one_of
from app.core.database import Database
from app.core.tables import Place, newest_first, now_us

_COLUMNS = [trials.c[name] for name in ABTestRow._fields]
_RUNNING = [trials.c[name] for name in RunningABTest._fields]
_IMPRESSION = ("recommendation_id", "trial_id", "user_id", "teams", "created_at")


class ABTestRepository:
    """Each read on its own connection, each write in its own transaction unless one is given."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def insert(self, row: ABTestRow) -> None:
        """Adds a trial. Raises IntegrityError while another of its kind runs."""
        async with self.database.write() as conn:
            await conn.execute(trials.insert().values(row._asdict()))

    async def get(self, trial_id: str) -> ABTestRow | None:
        """A trial; None if there is none."""
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(trials.c.trial_id == trial_id))
        return ABTestRow(*rows[0]) if rows else None

    async def page(self, below: Place | None, n: int) -> list[ABTestRow]:
        """Trials, newest first."""
        query = newest_first(sa.select(*_COLUMNS), trials.c.created_at, trials.c.trial_id, below)
        rows = await self.database.fetch(query.limit(n))
        return [ABTestRow(*row) for row in rows]

    async def running(self) -> list[RunningABTest]:
        """The running trials, at most one of a kind."""
        rows = await self.database.fetch(sa.select(*_RUNNING).where(trials.c.status == "running"))
        return [RunningABTest(*row) for row in rows]

    async def versions_in_use(self) -> set[str]:
        """Both versions of every running trial."""
        return {v for trial in await self.running() for v in (trial.version_a, trial.version_b)}

    async def end(self, trial_id: str, report: dict[str, Any]) -> bool:
        """Ends a trial; false if it has ended already."""
        async with self.database.write() as conn:
            updated = await conn.execute(
                trials.update()
                .where((trials.c.trial_id == trial_id) & (trials.c.status == "running"))
                .values(status="ended", ended_at=now_us(), report=report)
            )
        return updated.rowcount == 1

    async def add_impressions(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Adds impressions, once each. Raises IntegrityError if a user has been erased."""
        async with self.database.write() as conn:
            await insert_many(
                conn, impressions, _IMPRESSION, rows, on_conflict="ON CONFLICT DO NOTHING"
            )

    async def add_lists(self, lists: Mapping[tuple[str, int], int]) -> None:
        """Adds to the lists served by version and hour."""
        await self._add(served_lists, ("version", "hour"), "lists", lists)

    async def add_sums(self, sums: Mapping[tuple[str, str], float]) -> None:
        """Adds to the sums of trials by name."""
        await self._add(trial_sums, ("trial_id", "name"), "value", sums)

    async def _add(
        self,
        table: sa.Table,
        key: tuple[str, str],
        column: str,
        values: Mapping[tuple[str, Any], float],
    ) -> None:
        if not values:
            return
        # In one order everywhere, so that servers that add at the same time do not deadlock.
        rows = [(*pair, value) for pair, value in sorted(values.items())]
        add = (
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE "
            f"SET {column} = {table.name}.{column} + excluded.{column}"
        )
        async with self.database.write() as conn:
            await insert_many(conn, table, (*key, column), rows, on_conflict=add)

    async def sums(self, trial_id: str) -> dict[str, float]:
        """The sums of a trial by name."""
        rows = await self.database.fetch(
            sa.select(trial_sums.c.name, trial_sums.c.value).where(
                trial_sums.c.trial_id == trial_id
            )
        )
        return {row[0]: row[1] for row in rows}

    async def count_impressions(self, trial_id: str) -> int:
        """The number of a trial's interleaved lists."""
        rows = await self.database.fetch(
            sa.select(sa.func.count()).where(impressions.c.trial_id == trial_id)
        )
        return int(rows[0][0])

    async def impressions(
        self, trial_id: str, recommendation_ids: Collection[str]
    ) -> list[tuple[str, int | None, dict[str, list[int]]]]:
        """`(recommendation id, user, teams)` of those of the lists that belong to the trial."""
        rows = await self.database.fetch(
            sa.select(
                impressions.c.recommendation_id, impressions.c.user_id, impressions.c.teams
            ).where(
                one_of(impressions.c.recommendation_id, recommendation_ids, self.database.dialect),
                impressions.c.trial_id == trial_id,
            )
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def delete_impressions(self, ended_before: int, limit: int) -> int:
        """Deletes impressions of trials that ended before a time; returns how many."""
        old = sa.select(trials.c.trial_id).where(trials.c.ended_at < ended_before)
        some = (
            sa.select(impressions.c.recommendation_id)
            .where(impressions.c.trial_id.in_(old))
            .limit(limit)
        )
        async with self.database.write() as conn:
            deleted = await conn.execute(
                impressions.delete().where(impressions.c.recommendation_id.in_(some))
            )
        return deleted.rowcount

    async def erase(self, conn: AsyncConnection, user_id: int) -> None:
        """Deletes a user's impressions in the caller's transaction."""
        await conn.execute(impressions.delete().where(impressions.c.user_id == user_id))

    async def merge_users(self, conn: AsyncConnection, user_id: int, into: int) -> None:
        """Gives a user's impressions to another in the caller's transaction."""
        await conn.execute(
            impressions.update().where(impressions.c.user_id == user_id).values(user_id=into)
        )

    async def count_lists(self, version: str) -> int:
        """The number of lists that a version served."""
        rows = await self.database.fetch(
            sa.select(sa.func.coalesce(sa.func.sum(served_lists.c.lists), 0)).where(
                served_lists.c.version == version
            )
        )
        return int(rows[0][0])

    async def interleaving_periods(self, first: int, after: int) -> list[tuple[int, int]]:
        """Beginnings and ends of interleaving trials between two times, in microseconds."""
        rows = await self.database.fetch(
            sa.select(trials.c.created_at, sa.func.coalesce(trials.c.ended_at, after)).where(
                trials.c.kind == "interleaving",
                trials.c.created_at < after,
                sa.func.coalesce(trials.c.ended_at, after) >= first,
            )
        )
        return [(row[0], row[1]) for row in rows]

    async def versions_with_lists(self, first: int, after: int) -> list[str]:
        """Versions that served lists from one hour to before another."""
        rows = await self.database.fetch(
            sa.select(served_lists.c.version)
            .where(served_lists.c.hour >= first, served_lists.c.hour < after)
            .distinct()
        )
        return [row[0] for row in rows]

    async def lists_by_hour(self, version: str, first: int, after: int) -> dict[int, int]:
        """Lists that a version served by hour, from one hour to before another."""
        rows = await self.database.fetch(
            sa.select(served_lists.c.hour, served_lists.c.lists).where(
                served_lists.c.version == version,
                served_lists.c.hour >= first,
                served_lists.c.hour < after,
            )
        )
        return {row[0]: row[1] for row in rows}
