"""Queries on the registry."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.metadata import now_us
from app.models.schemas import Activation, ModelRow
from app.models.tables import activation, models

_COLUMNS = [models.c[name] for name in ModelRow._fields]


class ModelRepository:
    """Reads on a connection of its own, writes on the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def activation(self) -> Activation:
        rows = await self.database.fetch(
            sa.select(activation.c.version, activation.c.previous, activation.c.generation)
        )
        return Activation(*rows[0]) if rows else Activation(None, None, 0)

    async def get(self, version: str) -> ModelRow | None:
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(models.c.version == version))
        return ModelRow(*rows[0]) if rows else None

    async def page(self, offset: int, n: int) -> list[ModelRow]:
        """Newest first; versions begin with their time."""
        rows = await self.database.fetch(
            sa.select(*_COLUMNS).order_by(models.c.version.desc()).offset(offset).limit(n)
        )
        return [ModelRow(*row) for row in rows]

    async def insert(self, conn: AsyncConnection, row: ModelRow) -> None:
        await conn.execute(models.insert().values(row._asdict()))

    async def lock_activation(self, conn: AsyncConnection) -> Activation:
        """The activation, locked until the transaction ends; made where there is none yet."""
        if conn.dialect.name == "postgresql":
            # Two first activations at once: there is no row yet that could be locked.
            await conn.execute(sa.text("LOCK TABLE activation IN SHARE ROW EXCLUSIVE MODE"))
        rows = (
            await conn.execute(
                sa.select(activation.c.version, activation.c.previous, activation.c.generation)
            )
        ).all()
        if rows:
            return Activation(*rows[0])
        await conn.execute(activation.insert().values(id=1, generation=0))
        return Activation(None, None, 0)

    async def set_active(
        self, conn: AsyncConnection, version: str | None, previous: str | None
    ) -> None:
        now = now_us()
        values: dict[str, Any] = {
            "version": version,
            "previous": previous,
            "activated_at": now,
            "generation": activation.c.generation + 1,
        }
        await conn.execute(activation.update().values(values))
        if version is not None:
            await conn.execute(
                models.update().where(models.c.version == version).values(activated_at=now)
            )
