"""The jobs table: one worker at a time holds a job, fenced by owner and attempt."""

from __future__ import annotations

import asyncio

import pytest

from app.core.database import Database
from app.core.settings import Settings
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import TrainParams
from app.jobs.service import JobService

pytestmark = pytest.mark.anyio

LEASE_US, EXPIRED = 60_000_000, -1


async def submit(database: Database) -> str:
    return await JobService(database, Settings()).submit_training(TrainParams())


async def finish(database: Database, claim: Claim, status: str) -> bool:
    async with database.write() as conn:
        return await JobRepository(database).finish(conn, claim, status)


async def test_the_oldest_job_is_claimed_first_and_one_training_runs_at_a_time(
    database: Database,
) -> None:
    first, second = await submit(database), await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("a", LEASE_US, 3)
    assert claim is not None
    assert (claim.job_id, claim.attempt) == (first, 1)
    assert claim.params["model"] == "neupr"
    assert await jobs.claim("b", LEASE_US, 3) is None
    assert await finish(database, claim, "succeeded")
    following = await jobs.claim("b", LEASE_US, 3)
    assert following is not None
    assert following.job_id == second


async def test_one_of_several_workers_claims_a_job(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    claims = await asyncio.gather(*(jobs.claim(f"w{n}", LEASE_US, 3) for n in range(8)))
    assert sum(claim is not None for claim in claims) == 1


async def test_an_expired_lease_is_claimed_anew_and_the_old_owner_is_fenced_off(
    database: Database,
) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    old = await jobs.claim("a", EXPIRED, 3)
    new = await jobs.claim("b", LEASE_US, 3)
    assert old is not None
    assert new is not None
    assert (new.job_id, new.attempt) == (job_id, 2)
    assert await jobs.heartbeat(old, LEASE_US, {"phase": "late"}) is None
    assert not await finish(database, old, "succeeded")
    row = await jobs.get(job_id)
    assert row is not None
    assert (row.status, row.owner, row.progress) == ("running", "b", None)
    assert await jobs.heartbeat(new, LEASE_US, {"phase": "x"}) is False
    assert await finish(database, new, "succeeded")


async def test_a_heartbeat_renews_the_lease(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("a", 0, 3)
    assert claim is not None
    assert await jobs.heartbeat(claim, LEASE_US, {"phase": "x"}) is False
    assert await jobs.claim("b", LEASE_US, 3) is None
    row = await jobs.get(claim.job_id)
    assert row is not None
    assert (row.owner, row.progress) == ("a", {"phase": "x"})


async def test_a_job_fails_after_the_last_attempt(database: Database) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    for attempt in (1, 2):
        claim = await jobs.claim("w", EXPIRED, 2)
        assert claim is not None
        assert claim.attempt == attempt
    assert await jobs.claim("w", LEASE_US, 2) is None
    row = await jobs.get(job_id)
    assert row is not None
    assert (row.status, row.error) == ("failed", "its worker disappeared or stood still 2 times")


async def test_requeue_does_not_count_the_attempt(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    for _ in range(5):
        claim = await jobs.claim("w", LEASE_US, 3)
        assert claim is not None
        assert claim.attempt == 1
        await jobs.requeue(claim)


async def test_abandon_frees_the_job_at_once_and_counts_the_attempt(
    database: Database,
) -> None:
    await submit(database)
    jobs = JobRepository(database)
    for attempt in (1, 2):
        claim = await jobs.claim("w", LEASE_US, 2)
        assert claim is not None
        assert claim.attempt == attempt
        await jobs.abandon(claim)
    assert await jobs.claim("w", LEASE_US, 2) is None
    row = await jobs.get(claim.job_id)
    assert row is not None
    assert row.status == "failed"


async def test_a_cancelled_job_cannot_succeed_or_be_rejected(database: Database) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("w", LEASE_US, 3)
    assert claim is not None
    assert not (await JobService(database, Settings()).cancel(job_id)).finished_at
    for status in ("succeeded", "rejected"):
        assert not await finish(database, claim, status)
    async with database.read() as conn:
        assert await jobs.is_cancelled(conn, claim)
        assert not await jobs.is_cancelled(conn, claim._replace(attempt=2))
    assert await finish(database, claim, "cancelled")
