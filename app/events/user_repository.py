"""Queries on the descriptions of users, and on merged users."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import begins_with, insert_many, one_of
from app.core.database import Database
from app.core.tables import now_us
from app.events.shown_lists import move_shown
from app.events.tables import events, preferences, retractions, user_aliases, users
from app.events.user_schemas import Merged, NewUser, User

MAX_ALIASES = 1_000
"""The largest number of ids of merged users that stand for one user."""

_USER = (users.c.external_id, users.c.attributes, users.c.created_at)
_HAS_ATTRIBUTES = sa.cast(users.c.attributes, sa.Text) != "{}"
_UPSERT = """ON CONFLICT (external_id) DO UPDATE SET attributes = excluded.attributes,
 attributes_seq = excluded.attributes_seq WHERE users.attributes <> excluded.attributes"""
_WITH_ID = sa.select(users.c.id, *_USER)


class UserRepository:
    """Reads and writes the attributes of users, on both databases."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, external_id: str, conn: AsyncConnection | None = None) -> User | None:
        """Return a user; None for an unknown one."""
        query = sa.select(*_USER).where(users.c.external_id == external_id)
        if conn is None:
            rows = await self._database.fetch(query)
        else:
            rows = list(await conn.execute(query))
        return User(*rows[0]) if rows else None

    async def upsert(self, conn: AsyncConnection, rows: Collection[NewUser], seq: int) -> None:
        """Create users with distinct ids, or replace their attributes.

        Users whose attributes change get ``seq``, by which readers find the changes. The caller
        holds the lock of the event counter, because events create users, too.
        """
        now = now_us()
        await insert_many(
            conn,
            users,
            ("external_id", "attributes", "attributes_seq", "created_at"),
            [(row.id, orjson.dumps(row.attributes).decode(), seq, now) for row in rows],
            on_conflict=_UPSERT,
        )

    async def attributes_of(self, external_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the attributes of the users who have any, by the client's id."""
        wanted = one_of(users.c.external_id, external_ids, self._database.dialect)
        query = sa.select(users.c.external_id, users.c.attributes).where(wanted, _HAS_ATTRIBUTES)
        return {row[0]: row[1] for row in await self._database.fetch(query)}

    async def described(self, conn: AsyncConnection, external_ids: Collection[str]) -> set[str]:
        """Return the clients' ids of the users who have attributes."""
        wanted = one_of(users.c.external_id, external_ids, self._database.dialect)
        rows = await conn.execute(sa.select(users.c.external_id).where(wanted, _HAS_ATTRIBUTES))
        return {row[0] for row in rows}

    async def page(self, below: int | None, n: int, prefix: str | None) -> list[tuple[int, User]]:
        """Return at most ``n`` users below an internal id, newest first."""
        query = _WITH_ID if below is None else _WITH_ID.where(users.c.id < below)
        if prefix is not None:
            query = query.where(begins_with(users.c.external_id, prefix, self._database.dialect))
        return await self._with_ids(query.order_by(users.c.id.desc()).limit(n))

    async def described_in_order(self, after: int, n: int) -> list[tuple[int, User]]:
        """Return at most ``n`` users with attributes above an internal id, oldest first."""
        query = _WITH_ID.where(users.c.id > after, _HAS_ATTRIBUTES).order_by(users.c.id).limit(n)
        return await self._with_ids(query)

    # Merges. The caller holds the lock of the event counter.

    async def merged(self, conn: AsyncConnection, external_id: str) -> Merged | None:
        """Return the merge of a user; None for a user who was not merged."""
        rows = await conn.execute(
            sa.select(
                user_aliases.c.user_id,
                users.c.external_id,
                user_aliases.c.events,
                user_aliases.c.preferences,
                user_aliases.c.seq,
            )
            .join(users, users.c.id == user_aliases.c.user_id)
            .where(user_aliases.c.external_id == external_id)
        )
        row = rows.first()
        return None if row is None else Merged(*row)

    async def aliases_among(self, conn: AsyncConnection, external_ids: Collection[str]) -> set[str]:
        """Return the ids that belong to merged users."""
        wanted = one_of(user_aliases.c.external_id, external_ids, self._database.dialect)
        rows = await conn.execute(sa.select(user_aliases.c.external_id).where(wanted))
        return {row[0] for row in rows}

    async def lock(
        self, conn: AsyncConnection, external_id: str, *, stays: bool = False
    ) -> tuple[int, User] | None:
        """Lock a user's row and return it with the internal id; None for an unknown user.

        If the user ``stays``, other transactions can add rows of the user meanwhile, such as
        impressions.
        """
        query = _WITH_ID.where(users.c.external_id == external_id)
        query = query.with_for_update(key_share=stays)
        row = (await conn.execute(query)).first()
        return None if row is None else (row[0], User(*row[1:]))

    async def sizes(self, conn: AsyncConnection, user_id: int, limit: int) -> tuple[int, int]:
        """Return the numbers of a user's events and preferences, each at most ``limit``."""
        counts = []
        for table in (events, preferences):
            some = sa.select(table.c.seq).where(table.c.user_id == user_id).limit(limit).subquery()
            counts.append(await conn.scalar(sa.select(sa.func.count()).select_from(some)) or 0)
        return counts[0], counts[1]

    async def move(
        self, conn: AsyncConnection, source_id: int, target_id: int, first_seq: int, n_events: int
    ) -> None:
        """Give the events and preferences of a user to another, with new seqs in the same order.

        Readers that continue after a seq, and caches, see the moved rows as new. No model has seen
        these rows as the other user's.
        """
        for table, before in ((events, first_seq - 1), (preferences, first_seq + n_events - 1)):
            number = sa.func.row_number().over(order_by=table.c.seq) + before
            old = (
                sa.select(table.c.seq.label("old_seq"), number.label("new_seq"))
                .where(table.c.user_id == source_id)
                .subquery()
            )
            await conn.execute(
                table.update()
                .where(table.c.seq == old.c.old_seq)
                .values(seq=old.c.new_seq, user_id=target_id)
            )

    async def replace_by_alias(
        self, conn: AsyncConnection, source: tuple[int, str], merged: Merged, first_seq: int
    ) -> None:
        """Delete a user without events, whose id stands for another user from now on.

        Ids that stood for the deleted user stand for the other user, too. A user keeps the latest
        `MAX_ALIASES` ids.
        """
        source_id, external_id = source
        target_id = merged.into_id
        moved = merged.last_seq - first_seq
        if moved:
            last_seq = merged.last_seq - 1
            await conn.execute(
                users.update().where(users.c.id == target_id).values(last_seq=last_seq)
            )
        await conn.execute(
            user_aliases.update()
            .where(user_aliases.c.user_id == source_id)
            .values(user_id=target_id)
        )
        await move_shown(conn, external_id, merged.into)
        await conn.execute(users.delete().where(users.c.id == source_id))
        await conn.execute(retractions.insert().values(seq=merged.last_seq, user_id=source_id))
        # A version before may have created the user anew.
        await conn.execute(user_aliases.delete().where(user_aliases.c.external_id == external_id))
        await conn.execute(
            user_aliases.insert().values(
                external_id=external_id,
                user_id=target_id,
                first_seq=first_seq,
                seq=merged.last_seq,
                events=merged.events,
                preferences=merged.preferences,
                created_at=now_us(),
            )
        )
        oldest = (
            sa.select(user_aliases.c.external_id)
            .where(user_aliases.c.user_id == target_id)
            .order_by(user_aliases.c.seq.desc())
            .offset(MAX_ALIASES)
        )
        if self._database.dialect == "sqlite":
            oldest = oldest.limit(-1)  # its OFFSET needs one
        await conn.execute(user_aliases.delete().where(user_aliases.c.external_id.in_(oldest)))

    async def _with_ids(self, query: sa.Select[Any]) -> list[tuple[int, User]]:
        return [(row[0], User(*row[1:])) for row in await self._database.fetch(query)]
