"""The queries on users and events. Everything here runs in a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many, one_of, update_many
from app.core.database import Database
from app.core.metadata import CATALOG_SEQ, EVENT_SEQ, current_value, now_us
from app.events.schemas import Profile, StoredEvent
from app.events.tables import events, retractions, users

_EVENT_COLUMNS = (
    "seq",
    "event_id",
    "user_id",
    "item_id",
    "type",
    "value",
    "timestamp",
    "recommendation_id",
    "created_at",
)
_STORED = tuple(events.c[name] for name in _EVENT_COLUMNS[:-1])
_NO_IDS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_COUNTERS = sa.select(current_value(EVENT_SEQ), current_value(CATALOG_SEQ))
_USERS_SINCE = (
    sa.select(users.c.external_id)
    .join(events, events.c.user_id == users.c.id)
    .where(events.c.seq > sa.bindparam("seq", type_=sa.BigInteger))
    .distinct()
)
_ROWS_SINCE = sa.select(
    *(
        sa.select(sa.func.count())
        .select_from(table)
        .where(table.c.seq > sa.bindparam("seq", type_=sa.BigInteger))
        .scalar_subquery()
        for table in (events, retractions)
    )
)
_RETRACTED_SINCE = sa.select(retractions.c.user_id).where(
    retractions.c.seq > sa.bindparam("seq", type_=sa.BigInteger)
)


class EventRepository:
    """SQL for users and events, the same on both databases."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.dialect = database.dialect
        self._profile = _profile_statement(database.dialect)

    async def profile(self, external_id: str) -> Profile:
        """One query: the hot path of a recommendation."""
        row = (await self.database.fetch(self._profile, {"user": external_id}))[0]
        event_seq, catalog_seq, user_id, last_seq, seen, seqs = row
        if user_id is None:
            return Profile(None, 0, _NO_IDS, _NO_IDS, event_seq, catalog_seq)
        if self.dialect == "sqlite":
            seen, seqs = orjson.loads(seen), orjson.loads(seqs)
        own = np.array(seen, dtype=np.int64), np.array(seqs, dtype=np.int64)
        return Profile(user_id, last_seq, *own, event_seq, catalog_seq)

    async def counters(self) -> tuple[int, int]:
        """The highest seq given out, and the catalogue's number."""
        row = (await self.database.fetch(_COUNTERS))[0]
        return row[0], row[1]

    async def unaccounted(self, since: int, until: int) -> bool:
        """Whether seqs between these two belong to no event and no retraction.

        A server of before there were retractions gives such seqs to what it deletes; an event that
        came and went in between leaves one, too.
        """
        if until == since:
            return False
        rows = await self.database.fetch(_ROWS_SINCE, {"seq": since})
        return int(rows[0][0]) + int(rows[0][1]) < until - since

    async def users_since(self, seq: int) -> list[str]:
        """The clients' ids of the users with events after a seq."""
        return [row[0] for row in await self.database.fetch(_USERS_SINCE, {"seq": seq})]

    async def retracted_since(self, seq: int) -> list[int]:
        """The internal ids of users who took something back after a seq, or were erased."""
        return [row[0] for row in await self.database.fetch(_RETRACTED_SINCE, {"seq": seq})]

    async def stored(
        self, conn: AsyncConnection, event_ids: Collection[str]
    ) -> dict[str, StoredEvent]:
        """Those of the events that exist."""
        rows = await conn.execute(
            sa.select(*_STORED).where(one_of(events.c.event_id, event_ids, self.dialect))
        )
        return {row.event_id: StoredEvent(*row) for row in rows}

    async def user_ids(self, conn: AsyncConnection, external: Collection[str]) -> dict[str, int]:
        """The internal ids of those of the users that exist."""
        rows = await conn.execute(
            sa.select(users.c.external_id, users.c.id).where(
                one_of(users.c.external_id, external, self.dialect)
            )
        )
        return {row[0]: row[1] for row in rows}

    async def create_users(
        self, conn: AsyncConnection, external: Collection[str]
    ) -> dict[str, int]:
        """Create users that do not exist. The caller holds the lock of the events' counter."""
        now = now_us()
        await insert_many(
            conn, users, ("external_id", "created_at"), [(name, now) for name in external]
        )
        return await self.user_ids(conn, external)

    async def insert(self, conn: AsyncConnection, rows: Sequence[StoredEvent]) -> None:
        """Add events and move their users' last seq on."""
        now = now_us()
        await insert_many(conn, events, _EVENT_COLUMNS, [(*row, now) for row in rows])
        # Ascending, so the last of a user wins.
        last = {row.user_id: row.seq for row in rows}
        await update_many(conn, users, "last_seq", [(seq, user) for user, seq in last.items()])

    async def delete_event(self, conn: AsyncConnection, event_id: str) -> int | None:
        """Delete an event; its user, or None if there is no such event."""
        user_id: int | None = await conn.scalar(
            events.delete().where(events.c.event_id == event_id).returning(events.c.user_id)
        )
        return user_id

    async def touch_user(self, conn: AsyncConnection, user_id: int, seq: int) -> None:
        """Record that something of the user's was taken back."""
        await conn.execute(users.update().where(users.c.id == user_id).values(last_seq=seq))
        await conn.execute(retractions.insert().values(seq=seq, user_id=user_id))

    async def delete_user(self, conn: AsyncConnection, external_id: str, seq: int) -> bool:
        """Erase a user and all their events; whether there was one."""
        user_id = await conn.scalar(sa.select(users.c.id).where(users.c.external_id == external_id))
        if user_id is None:
            return False
        await conn.execute(events.delete().where(events.c.user_id == user_id))
        await conn.execute(users.delete().where(users.c.id == user_id))
        await conn.execute(retractions.insert().values(seq=seq, user_id=user_id))
        return True

    async def find_user(self, external_id: str) -> int | None:
        """The user's internal id."""
        rows = await self.database.fetch(
            sa.select(users.c.id).where(users.c.external_id == external_id)
        )
        return rows[0][0] if rows else None

    async def history(self, user_id: int, below: int | None, n: int) -> list[StoredEvent]:
        """A user's events below a seq, newest first."""
        query = (
            sa.select(*_STORED)
            .where(events.c.user_id == user_id)
            .order_by(events.c.seq.desc())
            .limit(n)
        )
        if below is not None:
            query = query.where(events.c.seq < below)
        return [StoredEvent(*row) for row in await self.database.fetch(query)]

    async def in_order(
        self, after: int, until: int, n: int, user_id: int | None
    ) -> list[tuple[StoredEvent, str]]:
        """At most `n` events above one seq and up to another, with their users' ids; in order."""
        query = (
            sa.select(*_STORED, users.c.external_id)
            .join(users, events.c.user_id == users.c.id)
            .where(events.c.seq > after, events.c.seq <= until)
            .order_by(events.c.seq)
            .limit(n)
        )
        if user_id is not None:
            query = query.where(events.c.user_id == user_id)
        return [(StoredEvent(*row[:-1]), row[-1]) for row in await self.database.fetch(query)]

    async def external_users(self, ids: Collection[int]) -> dict[int, str]:
        """The clients' ids of users."""
        rows = await self.database.fetch(
            sa.select(users.c.id, users.c.external_id).where(one_of(users.c.id, ids, self.dialect))
        )
        return {row[0]: row[1] for row in rows}

    async def active_users(self, n: int) -> list[tuple[int, str, int]]:
        """`(id, client's id, last seq)` of the users that something happened to last."""
        rows = await self.database.fetch(
            sa.select(users.c.id, users.c.external_id, users.c.last_seq)
            .order_by(users.c.last_seq.desc())
            .limit(n)
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def example_user(self) -> str | None:
        """The first user with 15 to 60 events, else the first with any."""
        count = sa.func.count()
        query = (
            sa.select(users.c.external_id)
            .join(events, events.c.user_id == users.c.id)
            .group_by(users.c.id, users.c.external_id)
            .order_by(sa.case((count.between(15, 60), 0), else_=1), users.c.id)
            .limit(1)
        )
        rows = await self.database.fetch(query)
        return rows[0][0] if rows else None

    async def popularity(self) -> list[tuple[int, int]]:
        """Each item with the number of distinct users that had to do with it."""
        rows = await self.database.fetch(
            sa.select(events.c.item_id, sa.func.count(events.c.user_id.distinct())).group_by(
                events.c.item_id
            )
        )
        return [(row[0], row[1]) for row in rows]

    async def since(self, seq: int, limit: int) -> list[tuple[int, int, int]]:
        """`(seq, user, item)` of the events after a seq, in order."""
        rows = await self.database.fetch(
            sa.select(events.c.seq, events.c.user_id, events.c.item_id)
            .where(events.c.seq > seq)
            .order_by(events.c.seq)
            .limit(limit)
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def last_seq(self) -> int:
        """The highest seq given out."""
        rows = await self.database.fetch(sa.select(current_value(EVENT_SEQ)))
        return int(rows[0][0])


def _profile_statement(dialect: str) -> sa.Select[Any]:
    """Everything that a recommendation asks of a user, as one row, also for an unknown user."""
    mine = sa.select(events.c.item_id, events.c.seq).where(events.c.user_id == users.c.id)
    lists: list[sa.ColumnElement[Any]]
    if dialect == "sqlite":
        ordered = mine.order_by(events.c.seq).correlate(users).subquery()
        lists = [
            sa.select(sa.func.json_group_array(ordered.c[name])).correlate(users).scalar_subquery()
            for name in ("item_id", "seq")
        ]
    else:
        lists = [
            sa.func.array(
                mine.with_only_columns(events.c[name])
                .order_by(events.c.seq)
                .correlate(users)
                .scalar_subquery()
            )
            for name in ("item_id", "seq")
        ]
    one = sa.select(
        current_value(EVENT_SEQ).label("event_seq"), current_value(CATALOG_SEQ).label("catalog_seq")
    ).subquery()
    return sa.select(one, users.c.id, users.c.last_seq, *lists).select_from(
        one.outerjoin(users, users.c.external_id == sa.bindparam("user", type_=sa.Text))
    )
