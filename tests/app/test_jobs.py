"""Jobs: durable, claimed by one worker at a time, fenced by owner and attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from app.core.database import Database
from app.core.errors import Conflict
from app.core.settings import Settings
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import TrainParams
from app.jobs.service import JobService

pytestmark = pytest.mark.anyio

LEASE, GONE = 60_000_000, -1


async def submit(database: Database) -> str:
    return await JobService(database, Settings()).submit_training(TrainParams())


async def finish(database: Database, claim: Claim, status: str) -> bool:
    async with database.write() as conn:
        return await JobRepository(database).finish(conn, claim, status)


async def test_oldest_first_and_one_training_at_a_time(database: Database) -> None:
    first, second = await submit(database), await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("a", LEASE, 3)
    assert claim is not None
    assert (claim.job_id, claim.attempt) == (first, 1)
    assert claim.params["model"] == "neupr"
    assert await jobs.claim("b", LEASE, 3) is None
    assert await finish(database, claim, "succeeded")
    following = await jobs.claim("b", LEASE, 3)
    assert following is not None
    assert following.job_id == second


async def test_workers_that_race_for_a_job(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    claims = await asyncio.gather(*(jobs.claim(f"w{n}", LEASE, 3) for n in range(8)))
    assert sum(claim is not None for claim in claims) == 1


async def test_a_lost_lease_is_taken_up_and_its_old_owner_can_write_nothing(
    database: Database,
) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    old = await jobs.claim("a", GONE, 3)
    new = await jobs.claim("b", LEASE, 3)
    assert old is not None
    assert new is not None
    assert (new.job_id, new.attempt) == (job_id, 2)
    assert await jobs.heartbeat(old, LEASE, {"phase": "late"}) is None
    assert not await finish(database, old, "succeeded")
    row = await jobs.get(job_id)
    assert row is not None
    assert (row.status, row.owner, row.progress) == ("running", "b", None)
    assert await jobs.heartbeat(new, LEASE, {"phase": "x"}) is False
    assert await finish(database, new, "succeeded")


async def test_a_heartbeat_keeps_the_lease(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("a", 0, 3)
    assert claim is not None
    assert await jobs.heartbeat(claim, LEASE, {"phase": "x"}) is False
    assert await jobs.claim("b", LEASE, 3) is None
    row = await jobs.get(claim.job_id)
    assert row is not None
    assert (row.owner, row.progress) == ("a", {"phase": "x"})


async def test_attempts_are_capped(database: Database) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    for attempt in (1, 2):
        claim = await jobs.claim("w", GONE, 2)
        assert claim is not None
        assert claim.attempt == attempt
    assert await jobs.claim("w", LEASE, 2) is None
    row = await jobs.get(job_id)
    assert row is not None
    assert (row.status, row.error) == ("failed", "its worker disappeared or stood still 2 times")


async def test_a_job_that_is_given_back_has_not_spent_an_attempt(database: Database) -> None:
    await submit(database)
    jobs = JobRepository(database)
    for _ in range(5):
        claim = await jobs.claim("w", LEASE, 3)
        assert claim is not None
        assert claim.attempt == 1
        await jobs.requeue(claim)


async def test_a_job_that_is_abandoned_can_be_taken_at_once_and_has_spent_an_attempt(
    database: Database,
) -> None:
    await submit(database)
    jobs = JobRepository(database)
    for attempt in (1, 2):
        claim = await jobs.claim("w", LEASE, 2)
        assert claim is not None
        assert claim.attempt == attempt
        await jobs.abandon(claim)
    assert await jobs.claim("w", LEASE, 2) is None
    row = await jobs.get(claim.job_id)
    assert row is not None
    assert row.status == "failed"


async def test_cancel_a_waiting_and_a_running_job(client: httpx2.AsyncClient, app: Any) -> None:
    database = app.state.services.database
    jobs = JobRepository(database)
    ids = [(await client.post("/admin/train")).json()["job_id"] for _ in range(2)]
    claim = await jobs.claim("w", LEASE, 3)
    assert claim is not None
    waiting = (await client.post(f"/admin/jobs/{ids[1]}/cancel")).json()
    assert waiting["status"] == "cancelled"
    running = (await client.post(f"/admin/jobs/{ids[0]}/cancel")).json()
    assert running["status"] == "running"
    assert await jobs.heartbeat(claim, LEASE, None) is True
    await finish(database, claim, "cancelled")
    again = await client.post(f"/admin/jobs/{ids[0]}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "job_ended")


async def test_what_was_cancelled_cannot_succeed_any_more(database: Database) -> None:
    job_id = await submit(database)
    jobs = JobRepository(database)
    claim = await jobs.claim("w", LEASE, 3)
    assert claim is not None
    assert not (await JobService(database, Settings()).cancel(job_id)).finished_at
    for status in ("succeeded", "rejected"):
        assert not await finish(database, claim, status)
    async with database.read() as conn:
        assert await jobs.is_cancelled(conn, claim)
        assert not await jobs.is_cancelled(conn, claim._replace(attempt=2))
    assert await finish(database, claim, "cancelled")


async def test_a_cancel_that_comes_a_moment_too_late(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(database)
    claim = await JobRepository(database).claim("w", LEASE, 3)
    assert claim is not None
    ask = JobRepository.request_cancel

    async def after_its_end(self: JobRepository, job_id: str) -> None:
        assert await finish(database, claim, "succeeded")
        await ask(self, job_id)

    monkeypatch.setattr(JobRepository, "request_cancel", after_its_end)
    with pytest.raises(Conflict, match="ended already: succeeded"):
        await JobService(database, Settings()).cancel(job_id)


async def test_jobs_over_http(client: httpx2.AsyncClient) -> None:
    ids = []
    for body in ({}, {"model": "nbpr", "factors": 16, "epochs": 3}):
        response = await client.post("/admin/train", json=body)
        assert response.status_code == 202
        ids.append(response.json()["job_id"])
        assert response.headers["location"] == f"/admin/jobs/{ids[-1]}"
    page = (await client.get("/admin/jobs", params={"n": 1})).json()
    assert [job["job_id"] for job in page["items"]] == ids[1:]
    rest = (await client.get("/admin/jobs", params={"cursor": page["next_cursor"]})).json()
    assert [job["job_id"] for job in rest["items"]] == ids[:1]
    job = (await client.get(f"/admin/jobs/{ids[1]}")).json()
    assert set(job) == {
        "job_id", "kind", "status", "params", "progress", "attempt", "created_at", "started_at",
        "finished_at", "model_version", "metrics", "error",
    }  # fmt: skip
    assert (job["status"], job["attempt"], job["params"]["factors"]) == ("queued", 0, 16)
    assert (await client.get("/admin/jobs/none")).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"model": "svd"},
        {"factors": 0},
        {"factors": 5000},
        {"factors": "8"},
        {"layers": 0},
        {"epochs": 0},
        {"alpha": 1.5},
        {"learning_rate": 0},
        {"modle": "nbpr"},
        [],
        "nbpr",
    ],
)
async def test_a_training_that_cannot_be(client: httpx2.AsyncClient, body: Any) -> None:
    response = await client.post("/admin/train", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert (await client.get("/admin/jobs")).json()["items"] == []
