"""The queries on users and events. Everything here runs in a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many, one_of, update_many
from app.core.database import Database
from app.core.metadata import EVENT_SEQ, current_value, now_us
from app.events.feedback import Feedback
from app.events.profile import Profile
from app.events.schemas import StoredEvent, StoredPreference
from app.events.statements import (
    COUNTERS,
    RETRACTED_SINCE,
    ROWS_SINCE,
    USERS_SINCE,
    popularity_statement,
    profile_statement,
)
from app.events.tables import events, preferences, retractions, users
from app.events.takers import Taking, met_statement, takers_statement

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
_NO_WEIGHTS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
_NO_PAIRS: NDArray[np.int64] = np.zeros((0, 4), dtype=np.int64)


class EventRepository:
    """SQL for users and events, the same on both databases."""

    def __init__(self, database: Database, feedback: Feedback) -> None:
        self.database = database
        self.dialect = database.dialect
        self.feedback = feedback
        self._is_positive = feedback.is_positive(events.c.type, events.c.value)
        self._profile = profile_statement(database.dialect, feedback)
        self._popularity = popularity_statement(feedback)
        self._met = met_statement(feedback)

    async def profile(self, external_id: str) -> Profile:
        """One query: the hot path of a recommendation."""
        row = (await self.database.fetch(self._profile, {"user": external_id}))[0]
        event_seq, catalog_seq, user_id, last_seq, own, stated = row
        at = event_seq, catalog_seq, self.feedback
        if user_id is None:
            return Profile(None, 0, _NO_IDS, _NO_IDS, _NO_WEIGHTS, _NO_IDS, _NO_PAIRS, *at)
        seen, seqs, timestamps, weights = orjson.loads(own)
        pairs = orjson.loads(stated)
        return Profile(
            user_id,
            last_seq,
            np.array(seen, dtype=np.int64),
            np.array(seqs, dtype=np.int64),
            np.array(weights, dtype=np.float32),
            np.array(timestamps, dtype=np.int64),
            np.array(pairs, dtype=np.int64).T if pairs[0] else _NO_PAIRS,
            *at,
        )

    async def counters(self) -> tuple[int, int]:
        """The highest seq given out, and the catalogue's number."""
        row = (await self.database.fetch(COUNTERS))[0]
        return row[0], row[1]

    async def unaccounted(self, since: int, until: int) -> bool:
        """Whether seqs between these two belong to no event, no preference and no retraction.

        A server of before there were retractions gives such seqs to what it deletes; an event that
        came and went in between leaves one, too.
        """
        if until == since:
            return False
        rows = await self.database.fetch(ROWS_SINCE, {"seq": since})
        return sum(int(count) for count in rows[0]) < until - since

    async def users_since(self, seq: int) -> list[str]:
        """The clients' ids of the users with events or preferences after a seq."""
        return [row[0] for row in await self.database.fetch(USERS_SINCE, {"seq": seq})]

    async def retracted_since(self, seq: int) -> list[int]:
        """The internal ids of users who took something back after a seq, or were erased."""
        return [row[0] for row in await self.database.fetch(RETRACTED_SINCE, {"seq": seq})]

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

    async def insert_preferences(
        self, conn: AsyncConnection, rows: Sequence[StoredPreference]
    ) -> None:
        """Add preferences and move their users' last seq on."""
        names = ("seq", "user_id", "winner_id", "loser_id", "timestamp")
        await insert_many(conn, preferences, names, rows)
        last = {row.user_id: row.seq for row in rows}
        await update_many(conn, users, "last_seq", [(seq, user) for user, seq in last.items()])

    async def stated(
        self, conn: AsyncConnection, user_ids: Collection[int]
    ) -> set[tuple[int, int, int, int]]:
        """`(user, winner, loser, timestamp)` of all that these users stated."""
        names = ("user_id", "winner_id", "loser_id", "timestamp")
        rows = await conn.execute(
            sa.select(*(preferences.c[name] for name in names)).where(
                one_of(preferences.c.user_id, user_ids, self.dialect)
            )
        )
        return {(row[0], row[1], row[2], row[3]) for row in rows}

    async def preferences_in_order(
        self, after: int, until: int, n: int, user_id: int | None
    ) -> list[tuple[StoredPreference, str]]:
        """As `in_order`, the stated preferences."""
        names = ("seq", "user_id", "winner_id", "loser_id", "timestamp")
        query = (
            sa.select(*(preferences.c[name] for name in names), users.c.external_id)
            .join(users, preferences.c.user_id == users.c.id)
            .where(preferences.c.seq > after, preferences.c.seq <= until)
            .order_by(preferences.c.seq)
            .limit(n)
        )
        if user_id is not None:
            query = query.where(preferences.c.user_id == user_id)
        rows = await self.database.fetch(query)
        return [(StoredPreference(*row[:-1]), row[-1]) for row in rows]

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

    async def lock_user(self, conn: AsyncConnection, external_id: str) -> int | None:
        """The user's internal id, to which nothing new can refer until the transaction ends."""
        user_id: int | None = await conn.scalar(
            sa.select(users.c.id).where(users.c.external_id == external_id).with_for_update()
        )
        return user_id

    async def delete_user(self, conn: AsyncConnection, user_id: int, seq: int) -> None:
        """Erase a user and all that they did and said."""
        for table in (events, preferences):
            await conn.execute(table.delete().where(table.c.user_id == user_id))
        await conn.execute(users.delete().where(users.c.id == user_id))
        await conn.execute(retractions.insert().values(seq=seq, user_id=user_id))

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
        """Each item with the number of distinct users of its positive events."""
        return [(row[0], row[1]) for row in await self.database.fetch(self._popularity)]

    async def taken_with(self, item_id: int, most: int) -> tuple[int, list[tuple[int, int]]]:
        """How many of an item's newest users were looked at, `most` at most, and `(item, users)`
        of the other items that they took up.
        """
        users = (
            sa.select(events.c.user_id)
            .where(events.c.item_id == item_id, self._is_positive)
            .distinct()
            .order_by(events.c.user_id.desc())
            .limit(most)
        )
        both = sa.func.count(events.c.user_id.distinct())
        rows = await self.database.fetch(
            sa.select(events.c.item_id, both)
            .where(events.c.user_id.in_(users), self._is_positive)
            .group_by(events.c.item_id)
        )
        of_items = {row[0]: row[1] for row in rows}
        return of_items.pop(item_id, 0), list(of_items.items())

    async def since(self, seq: int, limit: int) -> list[tuple[int, int, int]]:
        """`(seq, user, item)` of the positive events after a seq, in order."""
        rows = await self.database.fetch(
            sa.select(events.c.seq, events.c.user_id, events.c.item_id)
            .where(events.c.seq > seq, self._is_positive)
            .order_by(events.c.seq)
            .limit(limit)
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def met(self, seq: int, known_by: int, limit: int) -> list[tuple[int, int, int]]:
        """Of the first ``limit`` positive events after a seq `(item, events, last seq)`: how many
        are of users who had done or said something up to ``known_by``.
        """
        parameters = {"seq": seq, "known_by": known_by, "limit": limit}
        rows = await self.database.fetch(self._met, parameters)
        return [(row[0], int(row[1]), row[2]) for row in rows]

    async def takers(self, items: Collection[int], known_by: int, most: int) -> list[Taking]:
        """What speaks for these items by now: of each the ``most`` users whose last word came last,
        with their positive events. See `Taking`."""
        statement = takers_statement(one_of(events.c.item_id, items, self.dialect), self.feedback)
        rows = await self.database.fetch(statement, {"known_by": known_by, "most": most})
        return [Taking(*row) for row in rows]

    async def last_seq(self) -> int:
        """The highest seq given out."""
        rows = await self.database.fetch(sa.select(current_value(EVENT_SEQ)))
        return int(rows[0][0])
