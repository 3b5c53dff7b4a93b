"""Queries on jobs and triggers. A worker's writes are guarded by job, owner and attempt."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many
from app.core.database import Database
from app.core.errors import Conflict
from app.core.tables import Place, clock_us, newest_first, now_us
from app.jobs.schemas import ENDED, JobRow
from app.jobs.tables import jobs, triggers
from app.webhooks.outbox import Outbox

_COLUMNS = [jobs.c[name] for name in JobRow._fields]
_NAMES = {"train": "trainings", "export": "exports"}
_TOLD = ("job_id", "kind", "status", "model_version", "error")
_TOLD_COLUMNS = [jobs.c[name] for name in _TOLD]
_GAVE_A_MODEL = jobs.c.status.in_(("succeeded", "rejected")) & (jobs.c.kind == "train")


class Claim(NamedTuple):
    """A worker's hold on a job; the attempt is the fencing token."""

    job_id: str
    kind: str
    owner: str
    attempt: int
    params: dict[str, Any]


class JobRepository:
    """Queries on the jobs table."""

    def __init__(self, database: Database, outbox: Outbox | None = None) -> None:
        """``outbox`` takes a message of each job that ends."""
        self.database = database
        self._outbox = outbox or Outbox()

    async def insert(
        self,
        kind: str,
        params: dict[str, Any],
        conn: AsyncConnection | None = None,
        *,
        by: str | None = None,
        job_id: str | None = None,
        max_queued: int | None = None,
    ) -> str:
        """Queues a job and returns its id; in the caller's transaction if there is one.

        Raises:
            Conflict: ``max_queued`` jobs of this kind are queued.
        """
        if conn is None:
            async with self.database.write() as transaction:
                return await self.insert(
                    kind, params, transaction, by=by, job_id=job_id, max_queued=max_queued
                )
        if max_queued is not None:
            queued = (jobs.c.kind == kind) & (jobs.c.status == "queued")
            count = sa.select(sa.func.count()).select_from(jobs).where(queued)
            if (await conn.execute(count)).scalar_one() >= max_queued:
                raise Conflict(
                    f"{max_queued} {_NAMES.get(kind, kind)} are queued: wait, or cancel a job "
                    "by `POST /admin/jobs/{job_id}/cancel`",
                    code="queue_full",
                )
        job_id = job_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        job = jobs.insert().values(
            job_id=job_id, kind=kind, status="queued", params=params, created_at=now_us(), by=by
        )
        await conn.execute(job)
        return job_id

    async def get(self, job_id: str) -> JobRow | None:
        """A job; None if the job does not exist."""
        rows = await self.database.fetch(sa.select(*_COLUMNS).where(jobs.c.job_id == job_id))
        return JobRow(*rows[0]) if rows else None

    async def page(self, below: Place | None, n: int) -> list[JobRow]:
        """Jobs, newest first."""
        query = newest_first(sa.select(*_COLUMNS), jobs.c.created_at, jobs.c.job_id, below)
        rows = await self.database.fetch(query.limit(n))
        return [JobRow(*row) for row in rows]

    async def delete_ended(self, before_us: int, stored: Collection[str], n: int) -> int:
        """Deletes up to ``n`` jobs that ended before ``before_us``, and returns their number.

        The time is in microseconds since 1970. The jobs of ``stored`` model versions stay. The
        latest training that gave a model stays, because triggers count from its start.
        """
        # Without a training that gave a model, NULL would equal jobs that never began.
        started = sa.func.coalesce(sa.func.max(jobs.c.started_at), -1)
        latest = sa.select(started).where(_GAVE_A_MODEL).scalar_subquery()
        outdated = sa.select(jobs.c.job_id).where(
            jobs.c.status.in_(ENDED),
            jobs.c.finished_at < before_us,
            sa.func.coalesce(jobs.c.model_version, "").not_in(stored),
            jobs.c.started_at.is_distinct_from(latest),
        )
        async with self.database.write() as conn:
            deleted = await conn.execute(jobs.delete().where(jobs.c.job_id.in_(outdated.limit(n))))
        return deleted.rowcount

    async def states(self) -> list[tuple[str, str, int, int]]:
        """`(kind, status, count, oldest created_at)` of all jobs."""
        rows = await self.database.fetch(
            sa.select(
                jobs.c.kind, jobs.c.status, sa.func.count(), sa.func.min(jobs.c.created_at)
            ).group_by(jobs.c.kind, jobs.c.status)
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def claim(self, owner: str, lease_us: int, max_attempts: int) -> Claim | None:
        """Claims a job whose lease has expired, else the oldest queued job, candidates first.

        At most one training runs: while a training runs, no queued training is claimed. A partial
        unique index decides when two workers try at once. A lost job that was cancelled or has
        spent its attempts is ended instead.
        """
        now = clock_us(self.database.dialect)
        lost = (jobs.c.status == "running") & (jobs.c.lease_until < now)
        other = jobs.alias()
        training = sa.exists().where((other.c.kind == "train") & (other.c.status == "running"))
        # Not left to the index alone: each worker would run into it at each poll.
        queued = (jobs.c.status == "queued") & ((jobs.c.kind != "train") | ~training)
        async with self.database.write() as conn:
            # Spent or cancelled while no worker was there to act on it.
            ended = await conn.execute(
                jobs.update()
                .where(lost & (jobs.c.cancel_requested | (jobs.c.attempt >= max_attempts)))
                .values(
                    status=sa.case((jobs.c.cancel_requested, "cancelled"), else_="failed"),
                    error=sa.case(
                        (jobs.c.cancel_requested, None),
                        else_=f"the worker of the job disappeared or stalled {max_attempts} times",
                    ),
                    finished_at=now,
                )
                .returning(*_TOLD_COLUMNS)
            )
            await self._tell(conn, ended.all())
            rows = (
                await conn.execute(
                    sa.select(jobs.c.job_id, jobs.c.kind, jobs.c.attempt, jobs.c.params)
                    .where(lost | queued)
                    # Lost jobs first: until one is claimed, the index lets no other training run.
                    # Then candidates, which are quick and wanted at once.
                    .order_by(
                        jobs.c.status.desc(),
                        sa.case((jobs.c.kind == "candidates", 0), else_=1),
                        jobs.c.created_at,
                        jobs.c.job_id,
                    )
                    .limit(1)
                )
            ).all()
        if not rows:
            return None
        job = rows[0]
        claim = Claim(job.job_id, job.kind, owner, job.attempt + 1, job.params)
        try:
            async with self.database.write() as conn:
                claimed = await conn.execute(
                    jobs.update()
                    .where(
                        (jobs.c.job_id == claim.job_id)
                        & (jobs.c.attempt == job.attempt)
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
        return claim if claimed.rowcount == 1 else None

    async def last_training(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The params and metrics of the latest training that gave a model."""
        rows = await self.database.fetch(
            sa.select(jobs.c.params, jobs.c.metrics)
            .where(_GAVE_A_MODEL)
            .order_by(jobs.c.finished_at.desc())
            .limit(1)
        )
        return (rows[0].params, rows[0].metrics) if rows else None

    async def heartbeat(
        self, claim: Claim, lease_us: int, progress: dict[str, Any] | None
    ) -> bool | None:
        """Renews the lease and writes progress; returns whether to cancel, None for a lost job."""
        values: dict[str, Any] = {"lease_until": clock_us(self.database.dialect) + lease_us}
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
        """Ends a job in the caller's transaction.

        Returns False if the claim is no longer valid, or a cancelled job would end with a result.
        """
        held = _held(claim)
        if status in ("succeeded", "rejected"):
            held &= ~jobs.c.cancel_requested
        result = await conn.execute(
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
            .returning(*_TOLD_COLUMNS)
        )
        ended = result.all()
        await self._tell(conn, ended)
        return len(ended) == 1

    async def _tell(self, conn: AsyncConnection, ended: Sequence[sa.Row[Any]]) -> None:
        for job in ended:
            await self._outbox.add(conn, "job.ended", dict(zip(_TOLD, job, strict=True)))

    async def is_cancelled(self, conn: AsyncConnection, claim: Claim) -> bool:
        """Whether the claim is still valid and a client has cancelled the job."""
        query = sa.select(jobs.c.job_id).where(_held(claim) & jobs.c.cancel_requested)
        return (await conn.execute(query)).first() is not None

    async def requeue(self, claim: Claim) -> None:
        """Puts a job back into the queue without counting the attempt, as when its worker stops."""
        async with self.database.write() as conn:
            await conn.execute(
                jobs.update()
                .where(_held(claim))
                .values(status="queued", owner=None, lease_until=None, attempt=claim.attempt - 1)
            )

    async def abandon(self, claim: Claim) -> None:
        """Ends a lease early and counts the attempt, as when the worker was suspended."""
        async with self.database.write() as conn:
            await conn.execute(jobs.update().where(_held(claim)).values(lease_until=0))

    async def request_cancel(self, job_id: str) -> None:
        """Cancels a queued job at once, and a running job at its next heartbeat."""
        async with self.database.write() as conn:
            ended = await conn.execute(
                jobs.update()
                .where((jobs.c.job_id == job_id) & (jobs.c.status == "queued"))
                .values(status="cancelled", cancel_requested=True, finished_at=now_us())
                .returning(*_TOLD_COLUMNS)
            )
            await self._tell(conn, ended.all())
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


class Fired(NamedTuple):
    """The last firing of a trigger: the time, and the events' last seq at that time."""

    time_us: int
    """Microseconds since 1970."""
    seq: int


class TriggerRepository:
    """Queries on the triggers table, which all workers share: one row per trigger."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def last_fired(self) -> dict[str, Fired]:
        """The last firing of each trigger, by name."""
        rows = await self.database.fetch(sa.select(triggers))
        return {row.name: Fired(row.fired_at, row.fired_seq) for row in rows}

    async def replace(self, outdated: list[str], missing: list[str], fired: Fired) -> None:
        """Deletes outdated triggers, and adds missing triggers with ``fired`` as last firing."""
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
        """Locks all triggers until the transaction ends, and returns their last firings by name."""
        rows = await conn.execute(sa.select(triggers).order_by(triggers.c.name).with_for_update())
        return {row.name: Fired(row.fired_at, row.fired_seq) for row in rows}

    async def update(self, conn: AsyncConnection, name: str, fired: Fired) -> None:
        """Writes the last firing of a trigger."""
        await conn.execute(
            triggers.update()
            .where(triggers.c.name == name)
            .values(fired_at=fired.time_us, fired_seq=fired.seq)
        )

    async def has_pending_training(self, conn: AsyncConnection) -> bool:
        """Whether a training is queued or running."""
        pending = jobs.c.status.in_(("queued", "running")) & (jobs.c.kind == "train")
        return (await conn.execute(sa.select(jobs.c.job_id).where(pending))).first() is not None

    async def last_training_start(self, conn: AsyncConnection) -> int:
        """The start of the latest training that gave a model, in microseconds since 1970; or 0."""
        latest = sa.select(sa.func.max(jobs.c.started_at)).where(_GAVE_A_MODEL)
        return int((await conn.execute(latest)).scalar() or 0)
