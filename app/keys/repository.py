"""Queries on API keys."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.database import Database
from app.core.tables import instance, now_us
from app.keys.schemas import KeyRow
from app.keys.tables import api_keys

_COLUMNS = [api_keys.c[name] for name in KeyRow._fields]


class KeyRepository:
    """Reads and writes API keys, each write in its own transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def valid(self) -> list[KeyRow]:
        """The keys that are not revoked."""
        rows = await self._database.fetch(
            sa.select(*_COLUMNS).where(api_keys.c.revoked_at.is_(None))
        )
        return [KeyRow(*row) for row in rows]

    async def list(self) -> list[KeyRow]:
        """Every key, revoked ones included, newest first."""
        rows = await self._database.fetch(
            sa.select(*_COLUMNS).order_by(api_keys.c.created_at.desc(), api_keys.c.key_id)
        )
        return [KeyRow(*row) for row in rows]

    async def any(self) -> bool:
        """Whether there is a key, revoked or not."""
        return bool(await self._database.fetch(sa.select(api_keys.c.key_id).limit(1)))

    async def token_secret(self) -> str:
        """The secret of this database, from which the signing keys of tokens derive."""
        return str((await self._database.fetch(sa.select(instance.c.token_secret)))[0][0])

    async def insert(self, row: KeyRow) -> None:
        """Adds a key."""
        async with self._database.write() as conn:
            await conn.execute(api_keys.insert().values(row._asdict()))

    async def revoke(self, key_id: str) -> bool:
        """Revokes a key; False if the key does not exist or is already revoked."""
        async with self._database.write() as conn:
            updated = await conn.execute(
                api_keys.update()
                .where((api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None))
                .values(revoked_at=now_us())
            )
        return updated.rowcount == 1
