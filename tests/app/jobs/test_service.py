"""Jobs in the database: submitted, claimed, renewed, cancelled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from app.core import tables
from app.core.database import Database
from app.core.errors import Conflict, Unprocessable
from app.core.settings import Settings
from app.core.tables import now_us
from app.jobs import repository as repository_module
from app.jobs.metrics import JobMetrics
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import ENDED, TrainParams
from app.jobs.service import DAY_US, JobService
from app.jobs.tables import jobs as jobs_table
from app.registry.schemas import ModelRow
from app.wiring import Services
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = pytest.mark.anyio

LEASE_US = 60_000_000


async def test_cancelling_a_job_that_ends_in_that_moment_is_a_conflict(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = JobService(database, Settings())
    job_id = await service.submit_training(TrainParams())
    repository = JobRepository(database)
    claim = await repository.claim("w", LEASE_US, 3)
    assert claim is not None
    request_cancel = JobRepository.request_cancel

    async def end_first(self: JobRepository, job_id: str) -> None:
        async with database.write() as conn:
            assert await repository.finish(conn, claim, "succeeded")
        await request_cancel(self, job_id)

    monkeypatch.setattr(JobRepository, "request_cancel", end_first)
    with pytest.raises(Conflict, match="already ended: succeeded"):
        await service.cancel(job_id)


async def test_history_models_have_defaults_of_their_own(database: Database) -> None:
    async def stored(settings: Settings, **body: Any) -> tuple[Any, ...]:
        service = JobService(database, settings)
        job_id = await service.submit_training(TrainParams.model_validate(body))
        params = (await service.get(job_id)).params
        return params["users"], params["epochs"], params["learning_rate"]

    free, history = Settings(default_recipe="default"), Settings(default_users="history")
    assert await stored(free) == ("free", 15, 0.01)
    assert await stored(free, users="history") == ("history", 6, 0.005)
    assert await stored(free, users="history", epochs=2) == ("history", 2, 0.005)
    assert await stored(history) == ("history", 6, 0.005)
    assert await stored(history, users="free") == ("free", 15, 0.01)


async def test_hyperparameters_beside_auto_are_refused(database: Database) -> None:
    params = TrainParams.model_validate({"recipe": "auto", "factors": 8, "epochs": 2})
    with pytest.raises(Unprocessable, match="auto chooses these parameters: epochs, factors"):
        await JobService(database, Settings()).submit_training(params)


@pytest.mark.parametrize(
    ("body", "others"),
    [
        ({}, [{"seed": 3}, {"force": True}, {"recipe": "auto", "min_interactions": 2}]),
        ({"recipe": "auto", "seed": 3}, [{"recipe": "default", "seed": 3}, {"factors": 4}, {}]),
        ({"factors": 4, "users": "history"}, [{"factors": 5}, {"recipe": "auto"}]),
        ({"recipe": "next-item-nbpr", "factors": 32}, [{"recipe": "next-item-nbpr", "factors": 4}]),
    ],
)
async def test_a_training_that_is_sent_again_is_the_first_ones_job_whatever_the_settings_are_now(
    database: Database, body: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    params, changed = (
        TrainParams.model_validate(body),
        {"train_start": "warm", "default_factors": 9},
    )
    first = await JobService(database, Settings()).submit_training(params, "k", "x")
    for settings in (Settings.model_validate(changed), Settings(default_recipe="als-nbpr")):
        service = JobService(database, settings)
        assert await service.submit_training(params, "k", "x") == first
        for other in others:
            with pytest.raises(Conflict, match="another training"):
                await service.submit_training(TrainParams.model_validate(other), "k", "x")
    assert len((await service.page(None, 9))[0]) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"recipe": "als-nbpr", "model": "neupr"}, "is for nbpr with free users"),
        ({"recipe": "als-nbpr", "users": "history"}, "is for nbpr with free users"),
        ({"recipe": "next-item-nbpr", "users": "free"}, 'is for users="history"'),
        ({"model": "dncr", "factors": 512, "layers": 6}, "need embeddings of 8,192"),
    ],
)
async def test_what_cannot_be_trained_is_refused_before_it_is_queued(
    database: Database, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unprocessable, match=message) as refused:
        await JobService(database, Settings()).submit_training(TrainParams.model_validate(body))
    assert refused.value.code == "parameters_do_not_fit"


async def test_a_warm_start_that_does_not_fit_its_recipe_is_refused(database: Database) -> None:
    served = ModelRow(
        "v", "published", "nbpr", 8, "", "", 1, 1, 1, 1, {}, {}, None, 1, 1
    )  # fmt: skip

    async def serving() -> ModelRow:
        return served

    service = JobService(database, Settings(), serving)
    body = {"recipe": "als-nbpr", "model": "neupr", "start": "warm"}
    with pytest.raises(Unprocessable, match="is for nbpr with free users") as refused:
        await service.submit_training(TrainParams.model_validate(body))
    assert refused.value.code == "parameters_do_not_fit"


async def test_a_requested_training_says_so(database: Database) -> None:
    service = JobService(database, Settings())
    job_id = await service.submit_training(TrainParams())
    assert (await service.get(job_id)).params["trigger"] == "request"


EXPIRED = -1


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
    assert claim.params["recipe"] == "auto"
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
    assert (row.status, row.error) == (
        "failed",
        "the worker of the job disappeared or stalled 2 times",
    )


async def test_jobs_that_ended_long_ago_are_deleted(database: Database) -> None:
    service, jobs = JobService(database, Settings(keep_jobs_days=2)), JobRepository(database)
    ended = {"status": "cancelled", "finished_at": now_us() - 3 * DAY_US}
    await jobs.insert("train", {}, job_id="cancelled before any training gave a model")
    async with database.write() as conn:
        await conn.execute(jobs_table.update().values(ended))
    await service.delete_old({"stored"})
    assert await jobs.page(None, 100) == []
    await JobService(database, Settings(keep_jobs_days=36_500)).delete_old({"stored"})
    names = {
        "failed long ago": ("failed", None, 3),
        "failed lately": ("failed", None, 1),
        "of a stored version": ("succeeded", "stored", 3),
        "of a removed version": ("succeeded", "removed", 3),
        "the latest training": ("rejected", "removed", 2.5),
        "cancelled before it began": ("cancelled", None, 3),
        "queued": ("queued", None, 3),
    }
    for name, (status, version, days) in names.items():
        await jobs.insert("train", {}, job_id=name)
        at = now_us() - int(days * DAY_US)
        values = {"status": status, "model_version": version, "created_at": at}
        values |= {"finished_at": at} if status in ENDED else {}
        values |= {} if status in ("queued", "cancelled") else {"started_at": at}
        async with database.write() as conn:
            await conn.execute(
                jobs_table.update().where(jobs_table.c.job_id == name).values(values)
            )
    await service.delete_old({"stored"})
    left = {job.job_id for job in await jobs.page(None, 100)}
    gone = {"failed long ago", "of a removed version", "cancelled before it began"}
    assert left == names.keys() - gone


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


@ON_POSTGRESQL
@pytest.mark.parametrize("ahead_seconds", [-3600, 3600])
async def test_a_lease_ends_by_the_databases_clock(
    services: Services, ahead_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobRepository(services.database)
    await jobs.insert("train", {})
    ahead_us = ahead_seconds * 1_000_000

    def wrong() -> int:
        return time.time_ns() // 1000 + ahead_us

    with monkeypatch.context() as patch:
        for module in (tables, repository_module):
            patch.setattr(module, "now_us", wrong)
        claim = await jobs.claim("wrong", LEASE_US, 3)
        assert claim is not None
        assert await jobs.heartbeat(claim, LEASE_US, None) is False
    assert await jobs.claim("right", LEASE_US, 3) is None
    with monkeypatch.context() as patch:
        for module in (tables, repository_module):
            patch.setattr(module, "now_us", wrong)
        assert await jobs.claim("wrong again", LEASE_US, 3) is None
    assert await jobs.heartbeat(claim, -LEASE_US, None) is False
    taken = await jobs.claim("right", LEASE_US, 3)
    assert taken is not None
    assert (taken.job_id, taken.attempt) == (claim.job_id, 2)


async def test_a_training_that_has_to_wait_is_not_tried(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try would be an error in the log of PostgreSQL: the index lets one training run."""
    monkeypatch.setattr(repository_module, "IntegrityError", ZeroDivisionError)
    jobs = JobRepository(services.database)
    first = await jobs.insert("train", {})
    await jobs.insert("train", {})
    running = await jobs.claim("a", LEASE_US, 3)
    assert running is not None
    assert running.job_id == first
    assert await jobs.claim("b", LEASE_US, 3) is None
    candidates = await jobs.insert("candidates", {})
    claim = await jobs.claim("b", LEASE_US, 3)
    assert claim is not None
    assert claim.job_id == candidates
    assert await jobs.claim("c", LEASE_US, 3) is None
    await jobs.abandon(running)
    again = await jobs.claim("c", LEASE_US, 3)
    assert again is not None
    assert (again.job_id, again.attempt) == (running.job_id, 2)


@ON_SQLITE
async def test_states_without_jobs_are_zeros(services: Services) -> None:
    """An alert on the change of a series needs the series before the first failure."""
    metrics = JobMetrics(services.jobs)
    jobs = JobRepository(services.database)
    await jobs.insert("train", {})
    await metrics.refresh()
    states = next(metrics.collect())
    counts = {(s.labels["kind"], s.labels["status"]): s.value for s in states.samples}
    assert len(counts) == 18
    assert counts.pop(("train", "queued")) == 1
    assert set(counts.values()) == {0}
