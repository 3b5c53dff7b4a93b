"""Queries on users, events and stated preferences.

Methods that take a connection run in the caller's transaction. The queries for profiles
are in `profile_cache`, for new items in `adopters`, and for training in `snapshot_query`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import begins_with, insert_columns, insert_many, one_of, update_many
from app.core.database import Database
from app.core.tables import EVENT_SEQ, current_value, now_us
from app.events.event_weights import EventWeights
from app.events.schemas import NewEvent, StoredEvent, StoredPreference
from app.events.tables import (
    event_time,
    events,
    preferences,
    retractions,
    user_aliases,
    users,
    was_moved,
)

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_SEQS = 1_000_000
"""The number of seqs for which retractions stay. Servers further behind drop all profiles."""
COUNT_SECONDS = 1_800.0  # for a count over all events
REQUEST_SECONDS = 10.0  # for what a request waits for
SEARCH_SECONDS = 2.0
DAY_US = 86_400_000_000

_EVENT_FIELDS = StoredEvent._fields
_EVENT = tuple(events.c[name] for name in _EVENT_FIELDS)
_PREFERENCE_FIELDS = StoredPreference._fields
_PREFERENCE = tuple(preferences.c[name] for name in _PREFERENCE_FIELDS)


class EventRepository:
    """Reads and writes users, events and preferences, on both databases."""

    def __init__(self, database: Database, event_weights: EventWeights) -> None:
        self._database = database
        self._dialect = database.dialect
        self._is_positive = event_weights.is_positive(events.c.type, events.c.value)
        self._popularity = popularity_statement(event_weights).add_columns(
            current_value(EVENT_SEQ).label("seq")
        )

    # Users

    async def find_user(self, external_id: str) -> int | None:
        """Return the user's internal id; None for an unknown user."""
        rows = await self._database.fetch(
            sa.select(users.c.id).where(users.c.external_id == external_id)
        )
        return rows[0][0] if rows else None

    async def user_ids(
        self, conn: AsyncConnection, external_ids: Collection[str]
    ) -> dict[str, int]:
        """Return the internal ids of the users who exist, by the client's id.

        A merged user has the internal id of the user who remained.
        """
        found: dict[str, int] = {}
        missing = external_ids
        for name, user_id in (
            (users.c.external_id, users.c.id),
            (user_aliases.c.external_id, user_aliases.c.user_id),
        ):
            if missing:
                query = sa.select(name, user_id).where(one_of(name, missing, self._dialect))
                found |= {row[0]: row[1] for row in await conn.execute(query)}
                missing = [one for one in external_ids if one not in found]
        return found

    async def ensure_users(
        self, conn: AsyncConnection, external_ids: Iterable[str]
    ) -> dict[str, int]:
        """Return the users' internal ids, and create missing users in the given order.

        The caller holds the lock of the event counter.
        """
        names = list(dict.fromkeys(external_ids))
        user_ids = await self.user_ids(conn, names)
        missing = [name for name in names if name not in user_ids]
        if missing:
            now = now_us()
            rows = [(name, now) for name in missing]
            await insert_many(conn, users, ("external_id", "created_at"), rows)
            user_ids.update(await self.user_ids(conn, missing))
        return user_ids

    async def lock_user(self, conn: AsyncConnection, external_id: str) -> int | None:
        """Lock the user's row and return their internal id; None for an unknown user.

        Until the transaction ends, no other transaction can add rows that refer to the user.
        """
        user_id: int | None = await conn.scalar(
            sa.select(users.c.id).where(users.c.external_id == external_id).with_for_update()
        )
        return user_id

    async def delete_user(self, conn: AsyncConnection, user_id: int, seq: int) -> None:
        """Erase a user with events and preferences, and record a retraction at ``seq``."""
        for table in (events, preferences):
            await conn.execute(table.delete().where(table.c.user_id == user_id))
        await conn.execute(users.delete().where(users.c.id == user_id))
        await conn.execute(retractions.insert().values(seq=seq, user_id=user_id))

    async def active_users(self, n: int) -> list[tuple[int, str, int]]:
        """Return ``(internal id, client's id, last seq)`` of the ``n`` users who changed last."""
        rows = await self._database.fetch(
            sa.select(users.c.id, users.c.external_id, users.c.last_seq)
            .order_by(users.c.last_seq.desc())
            .limit(n)
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def users_in_order(
        self, after: int, until: int, n: int
    ) -> list[tuple[int, str, int, dict[str, Any]]]:
        """Return ``(internal id, client's id, created at, attributes)`` of users, oldest first.

        Args:
            after: only users above this internal id.
            until: only users up to this internal id.
            n: the number of rows at most.
        """
        rows = await self._database.fetch(
            sa.select(users.c.id, users.c.external_id, users.c.created_at, users.c.attributes)
            .where(users.c.id > after, users.c.id <= until)
            .order_by(users.c.id)
            .limit(n)
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def count_users(self) -> tuple[int, int]:
        """Return the number of users and the highest internal id; 0 and 0 without users."""
        # Apart: SQLite counts rows without reading them only where nothing else is asked for.
        n = sa.select(sa.func.count()).select_from(users).scalar_subquery()
        highest = sa.select(sa.func.coalesce(sa.func.max(users.c.id), 0)).scalar_subquery()
        rows = await self._database.fetch(sa.select(n, highest))
        return int(rows[0][0]), int(rows[0][1])

    async def find_users(self, prefix: str, n: int) -> list[str]:
        """Return at most ``n`` client ids that begin with a text, found by an index."""
        name = users.c.external_id
        found = begins_with(name, prefix, self._dialect)
        rows = await self._database.fetch(sa.select(name).where(found).limit(n))
        return sorted(row[0] for row in rows)

    async def users_containing(self, text: str, n: int, rows: int) -> list[str]:
        """Return at most ``n`` client ids of the newest users that contain a text, ignoring case.

        Args:
            text: the text.
            n: the number of ids at most.
            rows: the number of newest users to search, because no index serves the search.
        """
        newest = sa.select(users.c.external_id).order_by(users.c.id.desc()).limit(rows).subquery()
        name = newest.c.external_id
        # SQLite's LIKE ignores the case, and to lower it first would take as long again.
        like = name.contains if self._dialect == "sqlite" else name.icontains
        query = sa.select(name).where(like(text, autoescape=True))
        found = await self._database.fetch_heavy(query.limit(n), SEARCH_SECONDS)
        return sorted(row[0] for row in found)

    async def users_before(
        self, prefix: str, length: int, created_before: int, n: int
    ) -> list[str]:
        """Return at most ``n`` client ids with a prefix and a length, created before a time.

        The time is in microseconds since 1970.
        """
        name = users.c.external_id
        found = begins_with(name, prefix, self._dialect) & (users.c.created_at < created_before)
        found &= sa.func.length(name) == length
        rows = await self._database.fetch(sa.select(name).where(found).limit(n))
        return [row[0] for row in rows]

    async def recent_users(self, n: int) -> list[tuple[str, int]]:
        """Return ``(client id, time)`` of the users of the last events, the latest first.

        The time is that of acceptance, in microseconds since 1970.
        """
        last = (
            sa.select(events.c.user_id, events.c.created_at, events.c.seq)
            .order_by(events.c.seq.desc())
            .limit(20 * n)
            .subquery()
        )
        latest = sa.func.max(last.c.seq)
        rows = await self._database.fetch(
            sa.select(users.c.external_id, sa.func.max(last.c.created_at))
            .join(users, users.c.id == last.c.user_id)
            .group_by(users.c.external_id)
            .order_by(latest.desc())
            .limit(n)
        )
        return [(row[0], row[1]) for row in rows]

    async def takers_by_day(self, item_id: int, limit: int) -> list[tuple[int, int]]:
        """Count at most ``limit`` events about an item by day: ``(days since 1970, events)``."""
        some = (
            sa.select((events.c.timestamp // DAY_US).label("day"))
            .where(events.c.item_id == item_id)
            .limit(limit)
            .subquery()
        )
        rows = await self._database.fetch_heavy(
            sa.select(some.c.day, sa.func.count()).group_by(some.c.day).order_by(some.c.day),
            REQUEST_SECONDS,
        )
        return [(int(row[0]), row[1]) for row in rows]

    async def example_user(self) -> str | None:
        """Return the first user with 15 to 60 events, else the first with any, else None."""
        count = sa.func.count()
        query = (
            sa.select(users.c.external_id)
            .join(events, events.c.user_id == users.c.id)
            .group_by(users.c.id, users.c.external_id)
            .order_by(sa.case((count.between(15, 60), 0), else_=1), users.c.id)
            .limit(1)
        )
        rows = await self._database.fetch(query)
        return rows[0][0] if rows else None

    # Events

    async def last_seq(self) -> int:
        """Return the highest seq so far."""
        rows = await self._database.fetch(sa.select(current_value(EVENT_SEQ)))
        return int(rows[0][0])

    async def stored_events(
        self, conn: AsyncConnection, event_ids: Collection[str]
    ) -> dict[str, StoredEvent]:
        """Return the stored events with these ids, by event id."""
        rows = await conn.execute(
            sa.select(*_EVENT).where(one_of(events.c.event_id, event_ids, self._dialect))
        )
        return {event.event_id: event for event in map(StoredEvent._make, rows)}

    async def add_events(
        self,
        conn: AsyncConnection,
        first_seq: int,
        new_events: Collection[NewEvent],
        item_ids: dict[str, int],
    ) -> None:
        """Store events with consecutive seqs, and create missing users in the events' order."""
        user_ids = await self.ensure_users(conn, [event.user for event in new_events])
        now = now_us()
        rows = [
            (
                seq,
                event.event_id,
                user_ids[event.user],
                item_ids[event.item],
                event.type,
                event.value,
                event.timestamp,
                event.recommendation_id,
                now,
            )
            for seq, event in enumerate(new_events, first_seq)
        ]
        await insert_many(conn, events, (*_EVENT_FIELDS, "created_at"), rows)
        await _advance_users(conn, ((row[2], row[0]) for row in rows))

    async def add_event_columns(
        self,
        conn: AsyncConnection,
        first_seq: int,
        new_events: pa.RecordBatch,
        item_ids: dict[str, int],
    ) -> None:
        """Store a batch with the fields of `NewEvent`, as `add_events` does."""
        import pyarrow as pa

        n = new_events.num_rows
        seqs = np.arange(first_seq, first_seq + n)
        names = new_events["user"].dictionary_encode()
        user_ids = await self.ensure_users(conn, names.dictionary.to_pylist())
        columns = {name: new_events[name] for name in _EVENT_FIELDS if name in NewEvent._fields}
        columns |= {
            "seq": pa.array(seqs),
            "user_id": _ids_in(names, user_ids),
            "item_id": _ids_in(new_events["item"].dictionary_encode(), item_ids),
            "created_at": pa.array(np.full(n, now_us())),
        }
        await insert_columns(conn, events, columns)
        await _advance_users(conn, zip(columns["user_id"].to_pylist(), seqs.tolist(), strict=True))

    async def delete_event(self, conn: AsyncConnection, event_id: str) -> int | None:
        """Delete an event and return its user's internal id; None for an unknown event."""
        user_id: int | None = await conn.scalar(
            events.delete().where(events.c.event_id == event_id).returning(events.c.user_id)
        )
        return user_id

    async def record_retraction(self, conn: AsyncConnection, user_id: int, seq: int) -> None:
        """Record the deletion of a user's event: the user's last change is now ``seq``."""
        await conn.execute(users.update().where(users.c.id == user_id).values(last_seq=seq))
        await conn.execute(retractions.insert().values(seq=seq, user_id=user_id))

    async def delete_old_retractions(self) -> None:
        """Delete the retractions that are more than ``KEPT_SEQS`` seqs old."""
        before = sa.select(current_value(EVENT_SEQ) - KEPT_SEQS).scalar_subquery()
        async with self._database.write() as conn:
            await conn.execute(retractions.delete().where(retractions.c.seq < before))

    async def history(self, user_id: int, below: int | None, n: int) -> list[StoredEvent]:
        """Return at most ``n`` of the user's events below a seq, newest first."""
        query = (
            sa.select(*_EVENT)
            .where(events.c.user_id == user_id)
            .order_by(events.c.seq.desc())
            .limit(n)
        )
        if below is not None:
            query = query.where(events.c.seq < below)
        return [StoredEvent(*row) for row in await self._database.fetch(query)]

    async def events_in_order(
        self, after: int, until: int, n: int, user_id: int | None, *, moved: bool = False
    ) -> list[tuple[StoredEvent, str]]:
        """Return at most ``n`` events with their users' client ids, in the order of their seq.

        Args:
            after: only events above this seq.
            until: only events up to this seq.
            n: the number of rows at most.
            user_id: only events of this user; None: events of all users.
            moved: only events that got their seq by a merge of users.
        """
        rows = await self._rows_in_order(events, _EVENT, after, until, n, user_id, moved)
        return [(StoredEvent(*row[:-1]), row[-1]) for row in rows]

    async def times_by_item(self, user_ids: Collection[int]) -> NDArray[np.int64]:
        """Return (n, 3) users, items and times of all events of some users, ordered by user.

        Times are in microseconds since 1970.
        """
        rows = await self._database.fetch(
            sa.select(events.c.user_id, events.c.item_id, event_time())
            .where(one_of(events.c.user_id, user_ids, self._dialect))
            .order_by(events.c.user_id)
        )
        return np.array([tuple(row) for row in rows], dtype=np.int64).reshape(-1, 3)

    async def positive_events(self, seq: int, limit: int) -> list[tuple[int, int, int]]:
        """Return ``(seq, user, item)`` of at most ``limit`` positive events after a seq."""
        rows = await self._database.fetch(
            sa.select(events.c.seq, events.c.user_id, events.c.item_id)
            .where(events.c.seq > seq, self._is_positive)
            .order_by(events.c.seq)
            .limit(limit)
        )
        return [(row[0], row[1], row[2]) for row in rows]

    async def new_adoptions(self, seq: int, limit: int) -> list[tuple[int, int, bool]]:
        """Return ``(seq, item, is first)`` of at most ``limit`` positive events after a seq.

        An event is first if the user has no earlier positive event about the item. An event of a
        merged user is not first, because the count of the item already includes the merged user.
        """
        new = (
            sa.select(events.c.seq, events.c.user_id, events.c.item_id)
            .where(events.c.seq > seq, self._is_positive)
            .order_by(events.c.seq)
            .limit(limit)
            .subquery()
        )
        earlier = sa.exists().where(
            events.c.item_id == new.c.item_id,
            events.c.user_id == new.c.user_id,
            events.c.seq < new.c.seq,
            self._is_positive,
        )
        is_first = ~earlier & ~was_moved(new.c.seq)
        rows = await self._database.fetch(
            sa.select(new.c.seq, new.c.item_id, is_first).order_by(new.c.seq)
        )
        return [(row[0], row[1], bool(row[2])) for row in rows]

    async def is_retracted_since(self, seq: int) -> bool:
        """Return whether an event or a user was deleted after a seq."""
        later = sa.exists().where(retractions.c.seq > seq)
        return bool((await self._database.fetch(sa.select(later)))[0][0])

    async def popularity(self) -> tuple[int, list[tuple[int, int]]]:
        """Return each item with the number of distinct users with a positive event about it.

        Returns:
            The seq up to which events count, and ``(item, users)`` in any order.
        """
        before = await self.last_seq()
        rows = await self._database.fetch_heavy(self._popularity, COUNT_SECONDS)
        # The same statement reads both: what is counted is exactly what came up to this seq.
        seq = rows[0][2] if rows else before
        return seq, [(row[0], row[1]) for row in rows]

    async def co_occurrences(
        self, item_id: int, max_users: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Count the users of other items among the newest ``max_users`` users of an item.

        Returns:
            The number of users, and ``(other item, users of both items)``, by positive events.
        """
        newest_users = (
            sa.select(events.c.user_id)
            .where(events.c.item_id == item_id, self._is_positive)
            .distinct()
            .order_by(events.c.user_id.desc())
            .limit(max_users)
        )
        rows = await self._database.fetch_heavy(
            sa.select(events.c.item_id, sa.func.count(events.c.user_id.distinct()))
            .where(events.c.user_id.in_(newest_users), self._is_positive)
            .group_by(events.c.item_id),
            REQUEST_SECONDS,
        )
        counts = {row[0]: row[1] for row in rows}
        return counts.pop(item_id, 0), list(counts.items())

    # Stated preferences

    async def add_preferences(
        self, conn: AsyncConnection, rows: Sequence[StoredPreference]
    ) -> None:
        """Store preferences."""
        await insert_many(conn, preferences, _PREFERENCE_FIELDS, rows)
        await _advance_users(conn, ((row.user_id, row.seq) for row in rows))

    async def stored_preferences(
        self, conn: AsyncConnection, user_ids: Collection[int]
    ) -> set[tuple[int, int, int, int]]:
        """Return ``(user, winner, loser, timestamp)`` of every preference of these users."""
        rows = await conn.execute(
            sa.select(*_PREFERENCE[1:]).where(
                one_of(preferences.c.user_id, user_ids, self._dialect)
            )
        )
        return {(row[0], row[1], row[2], row[3]) for row in rows}

    async def preferences_in_order(
        self, after: int, until: int, n: int, user_id: int | None, *, moved: bool = False
    ) -> list[tuple[StoredPreference, str]]:
        """Return preferences as `events_in_order` returns events."""
        rows = await self._rows_in_order(preferences, _PREFERENCE, after, until, n, user_id, moved)
        return [(StoredPreference(*row[:-1]), row[-1]) for row in rows]

    async def _rows_in_order(
        self,
        table: sa.Table,
        columns: Sequence[sa.ColumnElement[Any]],
        after: int,
        until: int,
        n: int,
        user_id: int | None,
        moved: bool,
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        query = (
            sa.select(*columns, users.c.external_id)
            .join(users, table.c.user_id == users.c.id)
            .where(table.c.seq > after, table.c.seq <= until)
            .order_by(table.c.seq)
            .limit(n)
        )
        if user_id is not None:
            query = query.where(table.c.user_id == user_id)
        if moved:
            query = query.where(was_moved(table.c.seq))
        return await self._database.fetch(query)


def _ids_in(names: pa.DictionaryArray, ids: Mapping[str, int]) -> pa.Array:
    import pyarrow as pa

    found = pa.array([ids[name] for name in names.dictionary.to_pylist()], pa.int64())
    return found.take(names.indices)


async def _advance_users(conn: AsyncConnection, changes: Iterable[tuple[int, int]]) -> None:
    """Set the last seq of users from ascending ``(user, seq)``: a user's last pair wins."""
    last_seqs = dict(changes)
    await update_many(
        conn, users, "last_seq", [(seq, user_id) for user_id, seq in last_seqs.items()]
    )


def popularity_statement(event_weights: EventWeights) -> sa.Select[Any]:
    """Return the query for the number of users with a positive event, by item.

    The query counts all users of an item by an index alone, and subtracts the few users without a
    positive event. To read the type of every event would take twenty times as long.
    """
    count = sa.func.count(events.c.user_id.distinct()).label("n")
    by_item = sa.select(events.c.item_id, count).group_by(events.c.item_id)
    if event_weights.all_positive:
        return by_item
    # Plus 0: SQLite would otherwise use an index for DISTINCT, and look up every event.
    not_positive = (
        sa.select((events.c.item_id + 0).label("item_id"), events.c.user_id)
        .where(sa.not_(event_weights.is_positive(events.c.type, events.c.value)))
        .distinct()
        .subquery()
    )
    same = events.alias()
    without_positive = (
        sa.select(not_positive.c.item_id, sa.func.count().label("n"))
        .where(
            ~sa.exists().where(
                same.c.item_id == not_positive.c.item_id,
                same.c.user_id == not_positive.c.user_id,
                event_weights.is_positive(same.c.type, same.c.value),
            )
        )
        .group_by(not_positive.c.item_id)
        .subquery()
    )
    all_users = by_item.subquery()
    n_users = all_users.c.n - sa.func.coalesce(without_positive.c.n, 0)
    return (
        sa.select(all_users.c.item_id, n_users)
        .select_from(
            all_users.outerjoin(without_positive, without_positive.c.item_id == all_users.c.item_id)
        )
        .where(n_users > 0)
    )
