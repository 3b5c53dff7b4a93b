"""Queries on trials and on what was served."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many, one_of
from app.core.database import Database
from app.core.metadata import now_us
from app.trials.schemas import RunningTrial, TrialRow
from app.trials.tables import impressions, served, trial_sums, trials

_COLUMNS = [trials.c[name] for name in TrialRow._fields]
_RUNNING = [trials.c[name] for name in RunningTrial._fields]
_IMPRESSION = ("recommendation_id", "trial_id", "user_id", "teams", "created_at")


class TrialRepository:
    """SQL for trials, the same on both databases."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def insert(self, row: TrialRow) -> None:
        """Raises IntegrityError while another of its kind runs."""
        async with self.database.write() as conn:
            await conn.execute(trials.insert().values(row._asdict()))

    async def get(self, trial_id: str) -> TrialRow | None:
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(trials.c.trial_id == trial_id))
        return TrialRow(*rows[0]) if rows else None

    async def page(self, offset: int, n: int) -> list[TrialRow]:
        rows = await self.database.fetch(
            sa.select(*_COLUMNS)
            .order_by(trials.c.created_at.desc(), trials.c.trial_id.desc())
            .offset(offset)
            .limit(n)
        )
        return [TrialRow(*row) for row in rows]

    async def running(self) -> list[RunningTrial]:
        rows = await self.database.fetch(sa.select(*_RUNNING).where(trials.c.status == "running"))
        return [RunningTrial(*row) for row in rows]

    async def end(self, trial_id: str, report: dict[str, Any]) -> bool:
        """Ends a trial; False if it had ended already."""
        async with self.database.write() as conn:
            done = await conn.execute(
                trials.update()
                .where((trials.c.trial_id == trial_id) & (trials.c.status == "running"))
                .values(status="ended", ended_at=now_us(), report=report)
            )
        return done.rowcount == 1

    async def add_impressions(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """A second time it adds nothing. Raises IntegrityError where a user is gone."""
        async with self.database.write() as conn:
            await insert_many(
                conn, impressions, _IMPRESSION, rows, on_conflict="ON CONFLICT DO NOTHING"
            )

    async def add_served(self, lists: Mapping[tuple[str, int], int]) -> None:
        """Adds lists by version and hour."""
        await self._add(served, ("version", "hour"), "lists", lists)

    async def add_sums(self, sums: Mapping[tuple[str, str], float]) -> None:
        """Adds to sums by trial and name."""
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
        # In one order everywhere, so that servers that add at the same time never wait in a ring.
        rows = [(*both, value) for both, value in sorted(values.items())]
        add = (
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE "
            f"SET {column} = {table.name}.{column} + excluded.{column}"
        )
        async with self.database.write() as conn:
            await insert_many(conn, table, (*key, column), rows, on_conflict=add)

    async def sums(self, trial_id: str) -> dict[str, float]:
        rows = await self.database.fetch(
            sa.select(trial_sums.c.name, trial_sums.c.value).where(
                trial_sums.c.trial_id == trial_id
            )
        )
        return {row[0]: row[1] for row in rows}

    async def count_impressions(self, trial_id: str) -> int:
        rows = await self.database.fetch(
            sa.select(sa.func.count()).where(impressions.c.trial_id == trial_id)
        )
        return int(rows[0][0])

    async def impressions(
        self, trial_id: str, recommendation_ids: Collection[str]
    ) -> list[tuple[str, int | None, dict[str, list[int]]]]:
        """`(recommendation id, user, teams)` of those of the lists that are of this trial."""
        rows = await self.database.fetch(
            sa.select(
                impressions.c.recommendation_id, impressions.c.user_id, impressions.c.teams
            ).where(
                one_of(impressions.c.recommendation_id, recommendation_ids, self.database.dialect),
                impressions.c.trial_id == trial_id,
            )
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def forget(self, ended_before: int, most: int) -> int:
        """Removes some lists of trials that ended before a time; how many."""
        old = sa.select(trials.c.trial_id).where(trials.c.ended_at < ended_before)
        some = (
            sa.select(impressions.c.recommendation_id)
            .where(impressions.c.trial_id.in_(old))
            .limit(most)
        )
        async with self.database.write() as conn:
            gone = await conn.execute(
                impressions.delete().where(impressions.c.recommendation_id.in_(some))
            )
        return gone.rowcount

    async def erase(self, conn: AsyncConnection, user_id: int) -> None:
        """Removes a user's lists, in the caller's transaction."""
        await conn.execute(impressions.delete().where(impressions.c.user_id == user_id))

    async def lists(self, version: str) -> int:
        """How many lists of a version were given out."""
        rows = await self.database.fetch(
            sa.select(sa.func.coalesce(sa.func.sum(served.c.lists), 0)).where(
                served.c.version == version
            )
        )
        return int(rows[0][0])

    async def interleaved(self, first: int, after: int) -> list[tuple[int, int]]:
        """When lists were interleaved between two times, in microseconds: beginnings and ends."""
        rows = await self.database.fetch(
            sa.select(trials.c.created_at, sa.func.coalesce(trials.c.ended_at, after)).where(
                trials.c.kind == "interleaving",
                trials.c.created_at < after,
                sa.func.coalesce(trials.c.ended_at, after) >= first,
            )
        )
        return [(row[0], row[1]) for row in rows]

    async def versions(self, first: int, after: int) -> list[str]:
        """Versions with lists from one hour to before another."""
        rows = await self.database.fetch(
            sa.select(served.c.version)
            .where(served.c.hour >= first, served.c.hour < after)
            .distinct()
        )
        return [row[0] for row in rows]

    async def lists_by_hour(self, version: str, first: int, after: int) -> dict[int, int]:
        """Lists by hour, from one hour to before another."""
        rows = await self.database.fetch(
            sa.select(served.c.hour, served.c.lists).where(
                served.c.version == version, served.c.hour >= first, served.c.hour < after
            )
        )
        return {row[0]: row[1] for row in rows}
