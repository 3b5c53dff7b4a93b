"""Queries on jobs. Every write of a worker is guarded by job, owner and attempt."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.metadata import now_us
from app.jobs.schemas import JobRow
from app.jobs.tables import jobs

_COLUMNS = [jobs.c[name] for name in JobRow._fields]


class Claim(NamedTuple):
    """A worker's hold on a job; the attempt is the fencing token."""

    job_id: str
    kind: str
    owner: str
    attempt: int
    params: dict[str, Any]


class JobRepository:
    """Jobs in the database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def insert(
        self, kind: str, params: dict[str, Any], conn: AsyncConnection | None = None
    ) -> str:
        """Queues a job and returns its id; in the caller's transaction, if one is given."""
        job_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        job = jobs.insert().values(
            job_id=job_id, kind=kind, status="queued", params=params, created_at=now_us()
        )
        if conn is not None:
            await conn.execute(job)
        else:
            async with self.database.write() as own:
                await own.execute(job)
        return job_id

    async def get(self, job_id: str) -> JobRow | None:
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(jobs.c.job_id == job_id))
        return JobRow(*rows[0]) if rows else None

    async def page(self, offset: int, n: int) -> list[JobRow]:
        rows = await self.database.fetch(
            sa.select(*_COLUMNS)
            .order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc())
            .offset(offset)
            .limit(n)
        )
        return [JobRow(*row) for row in rows]

    async def states(self) -> list[tuple[str, str, int, int]]:
        """`(kind, status, count, oldest created_at)`."""
        rows = await self.database.fetch(
            sa.select(
                jobs.c.kind, jobs.c.status, sa.func.count(), sa.func.min(jobs.c.created_at)
            ).group_by(jobs.c.kind, jobs.c.status)
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def claim(self, owner: str, lease_us: int, max_attempts: int) -> Claim | None:
        """Takes the oldest job that waits, or one whose worker has let its lease run out.

        At most one training runs: while one does, by another worker with a live lease, nothing is
        taken (the partial unique index decides when two workers try at once).
        """
        now = now_us()
        lost = (jobs.c.status == "running") & (jobs.c.lease_until < now)
        async with self.database.write() as conn:
            # Given up or cancelled while nobody was there to act on it.
            await conn.execute(
                jobs.update()
                .where(lost & (jobs.c.cancel_requested | (jobs.c.attempt >= max_attempts)))
                .values(
                    status=sa.case((jobs.c.cancel_requested, "cancelled"), else_="failed"),
                    error=sa.case(
                        (jobs.c.cancel_requested, None),
                        else_=f"its worker disappeared or stood still {max_attempts} times",
                    ),
                    finished_at=now,
                )
            )
            rows = (
                await conn.execute(
                    sa.select(jobs.c.job_id, jobs.c.kind, jobs.c.attempt, jobs.c.params)
                    .where(lost | (jobs.c.status == "queued"))
                    # A lost one first: until it is taken up, the index lets no other run.
                    # Candidates are wanted at once, and quick.
                    .order_by(jobs.c.status.desc(), jobs.c.kind, jobs.c.created_at, jobs.c.job_id)
                    .limit(1)
                )
            ).all()
        if not rows:
            return None
        found = rows[0]
        claim = Claim(found.job_id, found.kind, owner, found.attempt + 1, found.params)
        try:
            async with self.database.write() as conn:
                taken = await conn.execute(
                    jobs.update()
                    .where(
                        (jobs.c.job_id == claim.job_id)
                        & (jobs.c.attempt == rows[0].attempt)
                        & (lost | (jobs.c.status == "queued"))
                    )
                    .values(
                        status="running",
                        owner=owner,
                        attempt=claim.attempt,
                        lease_until=now + lease_us,
                        started_at=sa.func.coalesce(jobs.c.started_at, now),
                        progress=None,
                    )
                )
        except IntegrityError:
            return None  # another training is running
        return claim if taken.rowcount == 1 else None

    async def heartbeat(
        self, claim: Claim, lease_us: int, progress: dict[str, Any] | None
    ) -> bool | None:
        """Keeps the lease and writes progress: whether to cancel, None if the job is lost."""
        values: dict[str, Any] = {"lease_until": now_us() + lease_us}
        if progress is not None:
            values["progress"] = progress
        async with self.database.write() as conn:
            rows = (
                await conn.execute(
                    jobs.update()
                    .where(_held(claim))
                    .values(values)
                    .returning(jobs.c.cancel_requested)
                )
            ).all()
        return bool(rows[0][0]) if rows else None

    async def finish(
        self,
        conn: AsyncConnection,
        claim: Claim,
        status: str,
        *,
        model_version: str | None = None,
        metrics: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> bool:
        """Ends a job, in the caller's transaction; False if it is not the caller's any more, or has
        something to show for it after somebody was told that it is cancelled.
        """
        held = _held(claim)
        if status in ("succeeded", "rejected"):
            held &= ~jobs.c.cancel_requested
        done = await conn.execute(
            jobs.update()
            .where(held)
            .values(
                status=status,
                finished_at=now_us(),
                lease_until=None,
                model_version=model_version,
                metrics=metrics,
                error=error,
            )
        )
        return done.rowcount == 1

    async def is_cancelled(self, conn: AsyncConnection, claim: Claim) -> bool:
        """Whether the job is the caller's still, and somebody has asked for its end."""
        query = sa.select(jobs.c.job_id).where(_held(claim) & jobs.c.cancel_requested)
        return (await conn.execute(query)).first() is not None

    async def requeue(self, claim: Claim) -> None:
        """Gives a job back, as when its worker is told to stop: the attempt does not count."""
        async with self.database.write() as conn:
            await conn.execute(
                jobs.update()
                .where(_held(claim))
                .values(status="queued", owner=None, lease_until=None, attempt=claim.attempt - 1)
            )

    async def abandon(self, claim: Claim) -> None:
        """Ends a lease early, as when its worker cannot go on: the attempt counts."""
        async with self.database.write() as conn:
            await conn.execute(jobs.update().where(_held(claim)).values(lease_until=0))

    async def request_cancel(self, job_id: str) -> None:
        """Cancels at once what waits; what runs is told by the next heartbeat."""
        async with self.database.write() as conn:
            await conn.execute(
                jobs.update()
                .where((jobs.c.job_id == job_id) & (jobs.c.status == "queued"))
                .values(status="cancelled", cancel_requested=True, finished_at=now_us())
            )
            await conn.execute(
                jobs.update()
                .where((jobs.c.job_id == job_id) & (jobs.c.status == "running"))
                .values(cancel_requested=True)
            )


def _held(claim: Claim) -> sa.ColumnElement[bool]:
    return (
        (jobs.c.job_id == claim.job_id)
        & (jobs.c.owner == claim.owner)
        & (jobs.c.attempt == claim.attempt)
        & (jobs.c.status == "running")
    )
