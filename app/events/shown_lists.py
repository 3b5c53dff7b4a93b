"""Shown lists: a user's later lists leave out shown items without a later event.

A served list waits in memory. Some milliseconds later, one transaction writes the lists of many
users, so no answer waits for the write. A reader gets the lists in the database, which all servers
share, and the waiting lists of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import each_of, insert_many, one_of
from app.core.database import AdvisoryLock, Database
from app.core.logging import get_logger
from app.core.tables import now_us
from app.events.profile import Profile
from app.events.profile_cache import RowReader
from app.events.seen_rule import MAX_HIDDEN_DAYS
from app.events.tables import shown_lists, users

log = get_logger(__name__)

MAX_LISTS = 100  # of a user, the latest
MAX_ITEMS = 1_000  # of a user: lists below the one in which so many are reached are dropped
MAX_WAITING = 20_000  # lists in memory; beyond it the oldest are dropped
WRITE_SECONDS = 0.05
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 1.5
GROUP_ROWS = 500
DELETE_ROWS = 5_000
DAY_US = 86_400_000_000
_COLUMNS = ("external_id", "shown_at", "seq", "item_ids", "length")


class ShownList(NamedTuple):
    """A list that was shown to a user."""

    shown_at: int
    """In microseconds since 1970."""
    seq: int
    """The highest seq that the list took in."""
    items: Sequence[int]
    """Internal ids."""


class _Waiting(NamedTuple):
    """A list that is not written yet."""

    user_id: int | None
    """None for a user without events."""
    shown: ShownList


class ShownLists:
    """Remembers the latest lists that were shown to each user.

    A caller needs `close()` at the end. A user keeps the newest lists: at most ``MAX_LISTS``, and
    no list below the one that reaches ``MAX_ITEMS`` items.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows = RowReader(database, _statement(database.dialect), {})
        self._waiting: dict[str, list[_Waiting]] = {}
        self._n_waiting = 0
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self.dropped = 0
        """The number of lists that were dropped, because too many lists waited."""

    def add(self, user: str, user_id: int | None, seq: int, items: Sequence[int]) -> None:
        """Remember a list that is being served. Returns at once.

        Args:
            user: the client's id.
            user_id: the internal id; None for a user without one.
            seq: the highest seq that the list took in.
            items: internal ids.
        """
        if not items:
            return
        while self._n_waiting >= MAX_WAITING:
            first = next(iter(self._waiting))
            self._remove(first, 1)
            self.dropped += 1
        lists = self._waiting.setdefault(user, [])
        shown_at = now_us()
        if lists:  # a user and a moment name a list
            shown_at = max(shown_at, lists[-1].shown.shown_at + 1)
        lists.append(_Waiting(user_id, ShownList(shown_at, seq, items)))
        self._n_waiting += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_on())

    async def of(self, user: str) -> list[ShownList]:
        """The lists that were shown to a user, in any order."""
        # First those that wait: one that is written meanwhile would be in neither. It may be in
        # both, and a moment names a list.
        lists = {each.shown.shown_at: each.shown for each in self._waiting.get(user, ())}
        (text,) = await self._rows.get(user)
        if text is not None:
            written = (ShownList(*row) for row in orjson.loads(f"[{text}]"))
            lists |= {each.shown_at: each for each in written}
        return list(lists.values())

    def forget(self, user: str) -> int:
        """Drop the waiting lists of a user who is being erased, and return their number."""
        n = len(self._waiting.get(user, ()))
        self._remove(user, n)
        return n

    async def write(self) -> None:
        """Write the waiting lists. After an error, the lists wait for the next call."""
        async with self._writing:
            while self._waiting:
                group: dict[str, list[_Waiting]] = {}
                n = 0
                for user, lists in self._waiting.items():
                    group[user] = lists[: GROUP_ROWS - n]
                    n += len(group[user])
                    if n >= GROUP_ROWS:
                        break
                await self._write_group(group)
                for user, lists in group.items():
                    self._drop_written(user, lists)

    async def delete_old(self) -> None:
        """Delete the lists that are older than ``MAX_HIDDEN_DAYS`` days."""
        before = now_us() - MAX_HIDDEN_DAYS * DAY_US
        key = sa.tuple_(shown_lists.c.external_id, shown_lists.c.shown_at)
        some = (
            sa.select(shown_lists.c.external_id, shown_lists.c.shown_at)
            .where(shown_lists.c.shown_at < before)
            .limit(DELETE_ROWS)
        )
        deleted = DELETE_ROWS
        while deleted == DELETE_ROWS:
            async with self._database.write() as conn:
                await _lock(conn)
                result = await conn.execute(shown_lists.delete().where(key.in_(some)))
            deleted = result.rowcount
            await asyncio.sleep(0)  # lets others write between two groups

    async def close(self) -> None:
        """Write the waiting lists, if the database answers within ``CLOSE_SECONDS``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.write()

    async def _write_on(self) -> None:
        while self._waiting:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                await self.write()
            except Exception as error:
                reason = str(error).partition("\n")[0]
                log.warning(
                    "shown lists cannot be written yet",
                    waiting=self._n_waiting,
                    dropped=self.dropped,
                    error=reason,
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _write_group(self, group: dict[str, list[_Waiting]]) -> None:
        user_ids = {each.user_id for lists in group.values() for each in lists}
        async with self._database.write() as conn:
            await _lock(conn)
            there = await _existing(conn, user_ids - {None})
            rows = [
                (
                    user,
                    shown.shown_at,
                    shown.seq,
                    orjson.dumps(list(shown.items)).decode(),
                    len(shown.items),
                )
                for user, lists in group.items()
                for user_id, shown in lists
                # Whoever was erased meanwhile has shown lists no more.
                if user_id is None or user_id in there
            ]
            # Two servers and one microsecond: that one list is lost is no harm.
            await insert_many(
                conn, shown_lists, _COLUMNS, rows, on_conflict="ON CONFLICT DO NOTHING"
            )
            await _trim(conn, group)

    def _drop_written(self, user: str, written: Sequence[_Waiting]) -> None:
        # Meanwhile a user may have been forgotten, and the oldest lists may have been dropped.
        now = self._waiting.get(user, [])
        done = {id(each) for each in written}
        self._remove(user, sum(id(each) in done for each in now))

    def _remove(self, user: str, n: int) -> None:
        """Remove the ``n`` oldest waiting lists of a user."""
        lists = self._waiting.get(user)
        if lists is None:
            return
        self._n_waiting -= min(n, len(lists))
        del lists[:n]
        if not lists:
            del self._waiting[user]


def hidden_items(
    lists: Iterable[ShownList], profile: Profile, since_us: int, at_us: int
) -> NDArray[np.int64]:
    """The items of lists shown after one time, up to another, without an event after the list.

    Args:
        lists: the lists that were shown to the user.
        profile: the profile of the user.
        since_us: the first time, in microseconds since 1970. Lists of that moment are too old.
        at_us: the other time, in microseconds since 1970. Lists of that moment count.
    """
    last: dict[int, int] = {}
    for shown in lists:
        if since_us < shown.shown_at <= at_us:
            for item in shown.items:
                last[item] = max(shown.seq, last.get(item, -1))
    if last:
        first = int(np.searchsorted(profile.seqs, min(last.values()), side="right"))
        later = zip(profile.seen[first:].tolist(), profile.seqs[first:].tolist(), strict=True)
        for item, seq in later:
            if seq > last.get(item, seq):
                del last[item]
    return np.fromiter(last, np.int64, len(last))


async def delete_shown(conn: AsyncConnection, external_id: str) -> int:
    """Delete a user's lists in the caller's transaction; return their number."""
    await _lock(conn)
    result = await conn.execute(
        shown_lists.delete().where(shown_lists.c.external_id == external_id)
    )
    return int(result.rowcount)


async def move_shown(conn: AsyncConnection, external_id: str, into: str) -> None:
    """Give a user's lists to another user in the caller's transaction."""
    await _lock(conn)
    other = shown_lists.alias()
    same_moment = sa.select(other.c.shown_at).where(other.c.external_id == into)
    of_user = shown_lists.c.external_id == external_id
    await conn.execute(shown_lists.delete().where(of_user, shown_lists.c.shown_at.in_(same_moment)))
    await conn.execute(shown_lists.update().where(of_user).values(external_id=into))
    await _trim(conn, [into])


async def _lock(conn: AsyncConnection) -> None:
    """Let no other process write shown lists until the transaction ends.

    Each write deletes surplus lists of several users, in no order. Two writes at a time could wait
    for each other.
    """
    if conn.dialect.name == "postgresql":
        await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(AdvisoryLock.SHOWN_LISTS.value)))


async def _existing(conn: AsyncConnection, user_ids: Collection[int | None]) -> set[int]:
    """The users who exist, and will exist until the transaction ends.

    Users who are being erased or merged are left out. The transaction that erases or merges them
    holds their rows, and then waits for the lock of shown lists.
    """
    if not user_ids:
        return set()
    wanted = one_of(users.c.id, user_ids, conn.dialect.name)
    query = sa.select(users.c.id).where(wanted)
    query = query.with_for_update(read=True, key_share=True, skip_locked=True)
    return {row[0] for row in await conn.execute(query)}


async def _trim(conn: AsyncConnection, external_ids: Iterable[str]) -> None:
    """Delete the lists of users beyond ``MAX_LISTS`` and ``MAX_ITEMS``."""
    user, newest = shown_lists.c.external_id, shown_lists.c.shown_at.desc()
    place = sa.func.row_number().over(partition_by=user, order_by=newest)
    so_far = sa.func.sum(shown_lists.c.length).over(partition_by=user, order_by=newest)
    counted = (
        sa.select(
            user,
            shown_lists.c.shown_at,
            place.label("place"),
            (so_far - shown_lists.c.length).label("items_above"),
        )
        .where(one_of(shown_lists.c.external_id, external_ids, conn.dialect.name))
        .subquery()
    )
    too_many = sa.select(counted.c.external_id, counted.c.shown_at).where(
        (counted.c.place > MAX_LISTS) | (counted.c.items_above >= MAX_ITEMS)
    )
    key = sa.tuple_(shown_lists.c.external_id, shown_lists.c.shown_at)
    await conn.execute(shown_lists.delete().where(key.in_(too_many)))


def _statement(dialect: str) -> sa.Select[Any]:
    """The query for users' lists: a row for each user, with all lists as JSON without brackets."""
    row: sa.ColumnElement[str] = sa.literal("[")
    for part in (shown_lists.c.shown_at, shown_lists.c.seq, shown_lists.c.item_ids):
        row = row + sa.cast(part, sa.Text) + ("]" if part is shown_lists.c.item_ids else ",")
    asked = each_of(sa.bindparam("users", type_=sa.Text), dialect)
    lists = (
        sa.select(sa.func.aggregate_strings(row, ","))
        .where(shown_lists.c.external_id == asked.c.value)
        .scalar_subquery()
    )
    return sa.select(asked.c.value, lists)
