"""Queries on users as clients describe them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import begins_with, insert_many, one_of
from app.core.database import Database
from app.core.tables import now_us
from app.events.tables import users
from app.events.user_schemas import NewUser, User

_USER = (users.c.external_id, users.c.attributes, users.c.created_at)
_HAS_ATTRIBUTES = sa.cast(users.c.attributes, sa.Text) != "{}"
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

    async def upsert(self, conn: AsyncConnection, rows: Collection[NewUser]) -> None:
        """Create users with distinct ids, or replace their attributes.

        The caller holds the lock of the event counter: events create users, too.
        """
        now = now_us()
        await insert_many(
            conn,
            users,
            ("external_id", "attributes", "created_at"),
            [(row.id, orjson.dumps(row.attributes).decode(), now) for row in rows],
            on_conflict=(
                "ON CONFLICT (external_id) DO UPDATE SET attributes = excluded.attributes"
            ),
        )

    async def described(self, conn: AsyncConnection, external_ids: Collection[str]) -> set[str]:
        """Return those of the users who have attributes."""
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

    async def _with_ids(self, query: sa.Select[Any]) -> list[tuple[int, User]]:
        return [(row[0], User(*row[1:])) for row in await self._database.fetch(query)]
