"""Queries on trials, impressions and served lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ab_tests.assignment import user_number
from app.ab_tests.schemas import ARMS, ABTestRow, Arm, Kind, RunningABTest
from app.ab_tests.tables import (
    impressions,
    served_lists,
    settings_trials,
    trial_lists,
    trial_sums,
    trials,
)
from app.core.bulk import insert_many, one_of
from app.core.database import AdvisoryLock, Database
from app.core.tables import Json, Place, newest_first, now_us

_ABSENT = {
    "kind": sa.literal("settings", sa.Text).label("kind"),
    "settings": sa.cast(sa.null(), Json).label("settings"),
    "planned_lists": sa.cast(sa.null(), sa.BigInteger).label("planned_lists"),
    "planned_clicked": sa.cast(sa.null(), sa.BigInteger).label("planned_clicked"),
}
"""The values of columns that a table of trials lacks."""


def _columns_of(table: sa.Table) -> sa.Select[Any]:
    return sa.select(
        *(table.c[name] if name in table.c else _ABSENT[name] for name in ABTestRow._fields)
    )


_ALL = sa.union_all(_columns_of(trials), _columns_of(settings_trials)).subquery()
"""The trials of all kinds."""
_COLUMNS = [_ALL.c[name] for name in ABTestRow._fields]
_RUNNING = [_ALL.c[name] for name in RunningABTest._fields]
_TABLES: Mapping[Kind, sa.Table] = {
    "interleaving": trials, "shadow": trials, "settings": settings_trials
}  # fmt: skip
_TRIAL_LISTS = ("trial_id", "arm", "user_number")
_IMPRESSION = ("recommendation_id", "trial_id", "user_id", "teams", "created_at")


async def _lock_trial_lists(conn: AsyncConnection) -> None:
    """Lets no other process write users' lists of trials until the transaction ends.

    Each write changes rows of several users, in its own order. Two writes at a time could wait for
    each other.
    """
    if conn.dialect.name == "postgresql":
        await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(AdvisoryLock.TRIAL_LISTS.value)))


class ABTestRepository:
    """Reads and writes trials, impressions and served lists.

    A write has a transaction of its own, unless the caller gives a connection.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    async def insert(self, row: ABTestRow) -> None:
        """Adds a trial. Raises IntegrityError while another of its kind runs."""
        table = _TABLES[row.kind]
        values = {name: value for name, value in row._asdict().items() if name in table.c}
        async with self.database.write() as conn:
            await conn.execute(table.insert().values(values))

    async def get(self, trial_id: str) -> ABTestRow | None:
        """A trial; None for an unknown id."""
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(_ALL.c.trial_id == trial_id))
        return ABTestRow(*rows[0]) if rows else None

    async def page(self, below: Place | None, n: int) -> list[ABTestRow]:
        """At most ``n`` trials below a place, newest first."""
        query = newest_first(sa.select(*_COLUMNS), _ALL.c.created_at, _ALL.c.trial_id, below)
        rows = await self.database.fetch(query.limit(n))
        return [ABTestRow(*row) for row in rows]

    async def running(self) -> list[RunningABTest]:
        """The running trials, at most one of a kind."""
        rows = await self.database.fetch(sa.select(*_RUNNING).where(_ALL.c.status == "running"))
        return [RunningABTest(*row) for row in rows]

    async def versions_in_use(self) -> set[str]:
        """Both versions of every running trial."""
        return {v for trial in await self.running() for v in (trial.version_a, trial.version_b)}

    async def end(self, kind: Kind, trial_id: str, report: dict[str, Any]) -> bool:
        """Ends a trial. Returns False if the trial has ended already."""
        table = _TABLES[kind]
        async with self.database.write() as conn:
            updated = await conn.execute(
                table.update()
                .where((table.c.trial_id == trial_id) & (table.c.status == "running"))
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
        """Adds to the numbers of served lists by version and hour."""
        await self._add(served_lists, ("version", "hour"), "lists", lists)

    async def add_sums(self, sums: Mapping[tuple[str, str], float]) -> None:
        """Adds to the sums of trials by name."""
        await self._add(trial_sums, ("trial_id", "name"), "value", sums)

    async def add_trial_lists(self, lists: Mapping[tuple[str, str, int], int]) -> None:
        """Adds to the numbers of lists by trial, arm and user number."""
        if lists:
            async with self.database.write() as conn:
                await _lock_trial_lists(conn)
                await _add_to(conn, trial_lists, _TRIAL_LISTS, "lists", lists)

    async def _add(
        self,
        table: sa.Table,
        key: tuple[str, ...],
        column: str,
        values: Mapping[Any, float],
    ) -> None:
        if values:
            async with self.database.write() as conn:
                await _add_to(conn, table, key, column, values)

    async def sums(self, trial_id: str) -> dict[str, float]:
        """The sums of a trial by name."""
        rows = await self.database.fetch(
            sa.select(trial_sums.c.name, trial_sums.c.value).where(
                trial_sums.c.trial_id == trial_id
            )
        )
        return {row[0]: row[1] for row in rows}

    async def lists_by_arm(self, trial_id: str) -> dict[str, tuple[int, int, int]]:
        """The numbers of users and lists, and the sum of squares of users' lists, by arm."""
        lists = trial_lists.c.lists
        rows = await self.database.fetch(
            sa.select(
                trial_lists.c.arm,
                sa.func.count(),
                sa.cast(sa.func.sum(lists), sa.BigInteger),
                sa.cast(sa.func.sum(lists * lists), sa.BigInteger),
            )
            .where(trial_lists.c.trial_id == trial_id)
            .group_by(trial_lists.c.arm)
        )
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    async def lists_of_users(
        self, trial_id: str, arm: Arm, numbers: Collection[int]
    ) -> dict[int, int]:
        """The number of lists of each user with lists in an arm of a trial, by user number."""
        rows = await self.database.fetch(
            sa.select(trial_lists.c.user_number, trial_lists.c.lists).where(
                trial_lists.c.trial_id == trial_id,
                trial_lists.c.arm == arm,
                one_of(trial_lists.c.user_number, numbers, self.database.dialect),
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
    ) -> list[tuple[str, int | None, dict[str, list[int]], int]]:
        """`(recommendation id, user, teams, created at)` of the lists that belong to a trial."""
        rows = await self.database.fetch(
            sa.select(
                impressions.c.recommendation_id,
                impressions.c.user_id,
                impressions.c.teams,
                impressions.c.created_at,
            ).where(
                one_of(impressions.c.recommendation_id, recommendation_ids, self.database.dialect),
                impressions.c.trial_id == trial_id,
            )
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def delete_impressions(self, ended_before: int, limit: int) -> int:
        """Deletes at most ``limit`` impressions of trials that ended before a time.

        The time is in microseconds since 1970. Returns the number of deleted impressions.
        """
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

    async def delete_trial_lists(self, ended_before: int, limit: int) -> int:
        """Deletes at most ``limit`` rows of users' lists of trials that ended before a time.

        The time is in microseconds since 1970. Returns the number of deleted rows.
        """
        old = sa.select(settings_trials.c.trial_id).where(settings_trials.c.ended_at < ended_before)
        key = sa.tuple_(*trial_lists.primary_key.columns)
        some = (
            sa.select(*trial_lists.primary_key.columns)
            .where(trial_lists.c.trial_id.in_(old))
            .limit(limit)
        )
        async with self.database.write() as conn:
            deleted = await conn.execute(trial_lists.delete().where(key.in_(some)))
        return deleted.rowcount

    async def erase(self, conn: AsyncConnection, user_id: int | None, user: str) -> int:
        """Deletes a user's impressions and lists in the caller's transaction.

        A user without an internal id has no impressions. Returns the number of deleted rows.
        """
        deleted = 0
        if user_id is not None:
            own = impressions.delete().where(impressions.c.user_id == user_id)
            deleted += (await conn.execute(own)).rowcount
        await _lock_trial_lists(conn)
        for trial_id in await self._settings_trials(conn):
            own = trial_lists.delete().where(_of_user(trial_id, user))
            deleted += (await conn.execute(own)).rowcount
        return deleted

    async def merge_users(
        self, conn: AsyncConnection, user_id: int, user: str, into_id: int, into: str
    ) -> None:
        """Gives a user's impressions and lists to another user in the caller's transaction."""
        await conn.execute(
            impressions.update().where(impressions.c.user_id == user_id).values(user_id=into_id)
        )
        await _lock_trial_lists(conn)
        for trial_id in await self._settings_trials(conn):
            taken = await conn.execute(
                trial_lists.delete()
                .where(_of_user(trial_id, user))
                .returning(trial_lists.c.arm, trial_lists.c.lists)
            )
            rows = {
                (trial_id, arm, user_number(trial_id, into)): lists for arm, lists in taken.all()
            }
            await _add_to(conn, trial_lists, _TRIAL_LISTS, "lists", rows)

    async def _settings_trials(self, conn: AsyncConnection) -> Sequence[str]:
        """The settings trials with counts of users' lists. Such trials are few at a time."""
        found = await conn.execute(
            sa.select(settings_trials.c.trial_id)
            .where(sa.exists().where(trial_lists.c.trial_id == settings_trials.c.trial_id))
            .order_by(settings_trials.c.trial_id)
        )
        return found.scalars().all()

    async def count_lists(self, version: str) -> int:
        """The number of lists that a version served."""
        rows = await self.database.fetch(
            sa.select(sa.func.coalesce(sa.func.sum(served_lists.c.lists), 0)).where(
                served_lists.c.version == version
            )
        )
        return int(rows[0][0])

    async def shown_periods(self, first: int, after: int) -> list[tuple[int, int]]:
        """Beginnings and ends of trials with shown lists between two times, in µs since 1970."""
        rows = await self.database.fetch(
            sa.select(_ALL.c.created_at, sa.func.coalesce(_ALL.c.ended_at, after)).where(
                _ALL.c.kind != "shadow",
                _ALL.c.created_at < after,
                sa.func.coalesce(_ALL.c.ended_at, after) >= first,
            )
        )
        return [(row[0], row[1]) for row in rows]

    async def versions_with_lists(self, first: int, after: int) -> list[str]:
        """Versions that served lists from hour ``first`` to before hour ``after``."""
        rows = await self.database.fetch(
            sa.select(served_lists.c.version)
            .where(served_lists.c.hour >= first, served_lists.c.hour < after)
            .distinct()
        )
        return [row[0] for row in rows]

    async def lists_by_hour(self, version: str, first: int, after: int) -> dict[int, int]:
        """The number of a version's served lists by hour, from ``first`` to before ``after``."""
        rows = await self.database.fetch(
            sa.select(served_lists.c.hour, served_lists.c.lists).where(
                served_lists.c.version == version,
                served_lists.c.hour >= first,
                served_lists.c.hour < after,
            )
        )
        return {row[0]: row[1] for row in rows}


async def _add_to(
    conn: AsyncConnection,
    table: sa.Table,
    key: tuple[str, ...],
    column: str,
    values: Mapping[Any, float],
) -> None:
    # In one order everywhere, so that servers that add at the same time do not deadlock.
    rows = [(*parts, value) for parts, value in sorted(values.items())]
    add = (
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE "
        f"SET {column} = {table.name}.{column} + excluded.{column}"
    )
    await insert_many(conn, table, (*key, column), rows, on_conflict=add)


def _of_user(trial_id: str, user: str) -> sa.ColumnElement[bool]:
    number = trial_lists.c.user_number == user_number(trial_id, user)
    return (trial_lists.c.trial_id == trial_id) & number & trial_lists.c.arm.in_(ARMS)
