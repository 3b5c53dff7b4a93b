"""Queries on what starts a training by itself."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many
from app.core.database import Database
from app.jobs.tables import jobs, triggers


class Fired(NamedTuple):
    """When a trigger last fired, in microseconds since 1970, and the events' last seq then."""

    at: int
    seq: int


class TriggerRows:
    """One row a trigger, whichever worker looks."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def fired(self) -> dict[str, Fired]:
        """Of every trigger there is."""
        rows = await self.database.fetch(sa.select(triggers))
        return {row.name: Fired(row.fired_at, row.fired_seq) for row in rows}

    async def replace(self, names: list[str], fired: Fired) -> None:
        """Makes those of the triggers that there are not yet, and removes all others."""
        async with self.database.write() as conn:
            await conn.execute(triggers.delete().where(triggers.c.name.not_in(names)))
            await insert_many(
                conn,
                triggers,
                ["name", "fired_at", "fired_seq"],
                [(name, *fired) for name in names],
                on_conflict="ON CONFLICT DO NOTHING",
            )

    async def lock(self, conn: AsyncConnection) -> dict[str, Fired]:
        """All triggers, until the transaction ends: others wait here."""
        rows = await conn.execute(sa.select(triggers).order_by(triggers.c.name).with_for_update())
        return {row.name: Fired(row.fired_at, row.fired_seq) for row in rows}

    async def write(self, conn: AsyncConnection, name: str, fired: Fired) -> None:
        await conn.execute(
            triggers.update()
            .where(triggers.c.name == name)
            .values(fired_at=fired.at, fired_seq=fired.seq)
        )

    async def trainings(self, conn: AsyncConnection) -> set[str]:
        """The states of trainings that have not ended."""
        waiting = jobs.c.status.in_(("queued", "running")) & (jobs.c.kind == "train")
        return set((await conn.execute(sa.select(jobs.c.status).where(waiting))).scalars())
