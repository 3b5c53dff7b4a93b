"""Queries on the registry's tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.tables import Place, newest_first, now_us
from app.registry.retention import StoredVersion
from app.registry.schemas import Activation, ActivationChange, ModelRow, Reason
from app.registry.tables import activation, activations, models

_COLUMNS = [models.c[name] for name in ModelRow._fields]
_CHANGE = [activations.c[name] for name in ActivationChange._fields]
_ACTIVATION = [activation.c[name] for name in Activation._fields]


class ModelRepository:
    """Reads on its own connection; writes in the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def activation(self, conn: AsyncConnection | None = None) -> Activation:
        """The active version, read on ``conn`` if one is given."""
        query = sa.select(*_ACTIVATION)
        rows = await self.database.fetch(query) if conn is None else await _all(conn, query)
        return Activation(*rows[0]) if rows else Activation(None, None, 0)

    async def serving(self) -> ModelRow | None:
        """The row of the active version; None without an active version."""
        active = activation.c.version == models.c.version
        rows = await self.database.fetch(sa.select(*_COLUMNS).join(activation, active))
        return ModelRow(*rows[0]) if rows else None

    async def get(self, version: str) -> ModelRow | None:
        """A version's row; None if the version does not exist."""
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(models.c.version == version))
        return ModelRow(*rows[0]) if rows else None

    async def known_versions(self) -> set[str]:
        """All versions that have a row, deleted ones included."""
        return {row[0] for row in await self.database.fetch(sa.select(models.c.version))}

    async def page(self, below: Place | None, n: int) -> list[ModelRow]:
        """Versions, newest first."""
        query = newest_first(sa.select(*_COLUMNS), models.c.created_at, models.c.version, below)
        rows = await self.database.fetch(query.limit(n))
        return [ModelRow(*row) for row in rows]

    async def trained_seq(self) -> int:
        """The highest seq that any version was trained up to; 0 if there is no version."""
        rows = await self.database.fetch(sa.select(sa.func.max(models.c.trained_seq)))
        return int(rows[0][0] or 0)

    async def insert(self, conn: AsyncConnection, row: ModelRow) -> None:
        """Adds a version."""
        await conn.execute(models.insert().values(row._asdict()))

    async def lock_activation(self, conn: AsyncConnection) -> Activation:
        """The active version, locked until the transaction ends; a missing row is inserted."""
        if conn.dialect.name == "postgresql":
            # Two first activations at the same time: there is no row yet to lock.
            await conn.execute(sa.text("LOCK TABLE activation IN SHARE ROW EXCLUSIVE MODE"))
        rows = (await conn.execute(sa.select(*_ACTIVATION))).all()
        if rows:
            return Activation(*rows[0])
        await conn.execute(activation.insert().values(id=1, generation=0))
        return Activation(None, None, 0)

    async def set_active(
        self,
        conn: AsyncConnection,
        before: Activation,
        after: Activation,
        reason: Reason,
        detail: dict[str, Any] | None,
        by: str | None = None,
    ) -> None:
        """Replaces the locked ``before`` by ``after`` and records the change in the history."""
        now = now_us()
        values: dict[str, Any] = after._asdict()
        if after.version != before.version:
            values["activated_at"] = now
            await conn.execute(
                models.update().where(models.c.version == after.version).values(activated_at=now)
            )
        await conn.execute(activation.update().values(values))
        change = ActivationChange(
            after.generation, after.version, before.version, reason, detail, now, by
        )
        await conn.execute(activations.insert().values(change._asdict()))

    async def changes(self, conn: AsyncConnection) -> list[ActivationChange]:
        """The whole history, oldest first."""
        rows = await conn.execute(sa.select(*_CHANGE).order_by(activations.c.generation))
        return [ActivationChange(*row) for row in rows]

    async def history(
        self, version: str | None, below: int | None, n: int
    ) -> list[ActivationChange]:
        """At most ``n`` changes of one version or of all, newest first, below a generation."""
        query = sa.select(*_CHANGE).order_by(activations.c.generation.desc())
        if version is not None:
            query = query.where(activations.c.version == version)
        if below is not None:
            query = query.where(activations.c.generation < below)
        rows = await self.database.fetch(query.limit(n))
        return [ActivationChange(*row) for row in rows]

    async def with_status(
        self, conn: AsyncConnection, versions: Collection[str], *statuses: str
    ) -> set[str]:
        """The versions among ``versions`` that have one of the statuses."""
        condition = models.c.version.in_(set(versions)) & models.c.status.in_(statuses)
        return set((await conn.execute(sa.select(models.c.version).where(condition))).scalars())

    async def stored_versions(self, conn: AsyncConnection) -> list[StoredVersion]:
        """All versions that are not marked as deleted."""
        query = sa.select(models.c.version, models.c.status, models.c.created_at)
        rows = await conn.execute(query.where(models.c.status != "deleted"))
        return [StoredVersion(*row) for row in rows]

    async def mark_deleted(self, conn: AsyncConnection, versions: Collection[str]) -> None:
        """Marks versions whose files are about to be removed."""
        await conn.execute(
            models.update().where(models.c.version.in_(set(versions))).values(status="deleted")
        )

    async def status(self, conn: AsyncConnection, version: str) -> str | None:
        """A version's status; None if the version does not exist."""
        query = sa.select(models.c.status).where(models.c.version == version)
        return (await conn.execute(query)).scalar()

    async def publish_by_force(self, conn: AsyncConnection, row: ModelRow) -> None:
        """Publishes a rejected version, and records the force in the gate's report."""
        gate = (row.metrics.get("gate") or {}) | {"forced": True}
        await conn.execute(
            models.update()
            .where(models.c.version == row.version)
            .values(status="published", metrics=row.metrics | {"gate": gate})
        )


async def _all(conn: AsyncConnection, query: sa.Executable) -> Sequence[sa.Row[*tuple[Any, ...]]]:
    return (await conn.execute(query)).all()
