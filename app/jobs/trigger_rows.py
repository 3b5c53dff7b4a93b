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

    async def renew(self, missing: list[str], fired: Fired, outdated: list[str]) -> None:
        """Makes triggers that there are not yet, and removes outdated ones."""
        async with self.database.write() as conn:
            await conn.execute(triggers.delete().where(triggers.c.name.in_(outdated)))
            await insert_many(
                conn,
                triggers,
                ["name", "fired_at", "fired_seq"],
                [(name, *fired) for name in missing],
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

    async def under_way(self, conn: AsyncConnection) -> bool:
        """Whether a training has not ended, or not begun."""
        waiting = jobs.c.status.in_(("queued", "running")) & (jobs.c.kind == "train")
        return (await conn.execute(sa.select(jobs.c.job_id).where(waiting))).first() is not None

    async def begun(self, conn: AsyncConnection) -> int:
        """When the latest of the trainings that came to an end of their own began, or 0."""
        done = jobs.c.status.in_(("succeeded", "rejected")) & (jobs.c.kind == "train")
        latest = sa.select(sa.func.max(jobs.c.started_at)).where(done)
        return int((await conn.execute(latest)).scalar() or 0)
