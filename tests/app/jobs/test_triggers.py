"""Triggers of trainings, with several workers checking at once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from app.core.database import Database
from app.core.settings import Settings, load_settings
from app.jobs.repository import Claim, JobRepository, TriggerRepository
from app.jobs.schemas import JobRow, TrainParams
from app.jobs.service import JobService
from app.jobs.tables import jobs
from app.jobs.triggers import Triggers
from app.wiring import Services
from app.worker.worker import build_worker
from tests.app.conftest import add_small_data, publish_model, until

pytestmark = pytest.mark.anyio


def microseconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


class World:
    """A database, the time and the number of events, with workers that check triggers."""

    def __init__(self, database: Database, **settings: Any) -> None:
        self.database = database
        self.settings = load_settings(**settings)
        self.now = microseconds("2026-11-22 00:00")
        self.seq = self.trained = 0

    def worker(self) -> Triggers:
        async def seq() -> int:
            return self.seq

        async def trained() -> int:
            return self.trained

        jobs = JobService(self.database, self.settings)
        return Triggers(self.database, self.settings, jobs, seq, trained, now=lambda: self.now)

    async def check(self, workers: int = 3) -> list[str]:
        """All workers check at the same moment; the ids of the jobs that were queued."""
        fired = await asyncio.gather(*(self.worker().fire() for _ in range(workers)))
        return [job_id for job_id in fired if job_id is not None]

    def at(self, text: str) -> World:
        self.now = microseconds(text)
        return self

    async def jobs(self) -> list[JobRow]:
        return await JobRepository(self.database).page(None, 100)

    async def begin(self) -> Claim:
        claim = await JobRepository(self.database).claim("w", 60_000_000, 3)
        assert claim is not None
        async with self.database.write() as conn:
            update = jobs.update().where(jobs.c.job_id == claim.job_id)
            await conn.execute(update.values(started_at=self.now))
        return claim

    async def end(self, claim: Claim, status: str = "succeeded") -> None:
        async with self.database.write() as conn:
            assert await JobRepository(self.database).finish(conn, claim, status)

    async def train(self) -> None:
        claim = await self.begin()
        self.trained = self.seq
        await self.end(claim)


async def test_no_triggers_by_default(database: Database) -> None:
    world = World(database)
    world.seq = 10**6
    assert await world.check() == []


async def test_a_schedule_fires_once_however_many_workers_check(database: Database) -> None:
    world = World(database, train_schedule="30 3 * * *")
    assert await world.at("2026-11-22 12:00").check() == []  # what was before it was set is past
    assert await world.at("2026-11-23 03:29:59").check() == []
    [job_id] = await world.at("2026-11-23 03:30").check()
    [job] = await world.jobs()
    assert (job.job_id, job.params["trigger"], job.status) == (job_id, "schedule", "queued")
    assert await world.check() == []
    await world.train()
    assert await world.at("2026-11-24 03:00").check() == []
    assert len(await world.at("2026-11-24 03:31").check()) == 1


async def test_a_schedule_missed_several_times_fires_once(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *")
    await world.check()
    assert len(await world.at("2026-11-29 00:30").check()) == 1  # after a week
    await world.train()
    assert await world.check() == []


async def test_a_pending_training_defers_triggers(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *", train_every=10)
    await world.check()
    await JobService(database, world.settings).submit_training(TrainParams())
    world.seq = 50
    assert await world.at("2026-11-22 01:00").check() == []  # that one will read all there is
    claim = await world.begin()
    assert await world.at("2026-11-22 01:30").check() == []

    # What falls due while it runs has not been read by it, and waits for its end.
    world.trained = 50
    assert await world.at("2026-11-22 02:00").check() == []
    await world.end(claim)
    assert len(await world.at("2026-11-22 02:10").check()) == 1
    await world.train()
    assert await world.check() == []


async def test_a_training_is_queued_after_a_number_of_new_events(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = 99
    assert await world.check() == []
    world.seq = 100
    [_] = await world.check()
    world.seq = 130
    assert (await world.jobs())[0].params["trigger"] == "events"
    await world.train()  # has learned from 130
    world.seq = 229
    assert await world.check() == []
    world.seq = 230
    assert len(await world.check()) == 1


async def test_a_requested_training_restarts_the_count_of_events(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = world.trained = 90
    assert await world.check() == []
    world.seq = 189
    assert await world.check() == []


async def test_a_failed_training_is_not_repeated_until_more_events_come(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = 100
    [_] = await world.check()
    await world.end(await world.begin(), "failed")
    assert await world.check() == []
    world.seq = 200
    assert len(await world.check()) == 1


async def test_two_triggers_due_at_once_queue_one_training(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *", train_every=10)
    await world.check()
    world.seq = 10
    assert len(await world.at("2026-11-22 01:00").check(workers=6)) == 1
    await world.train()
    assert await world.check() == []


async def test_a_new_schedule_has_missed_nothing(database: Database) -> None:
    before = World(database, train_schedule="0 3 * * *")
    await before.check()
    world = World(database, train_schedule="0 5 * * *")
    assert await world.at("2026-11-23 06:00").check() == []
    assert len(await world.at("2026-11-24 05:00").check()) == 1


async def test_workers_with_other_settings_keep_their_own_triggers(database: Database) -> None:
    nightly = World(database, train_schedule="0 3 * * *")
    noon = World(database, train_schedule="0 12 * * *", train_every=100)

    async def check(text: str, seq: int) -> list[str]:
        queued = []
        for world in (nightly, noon) * 2:
            world.seq = seq
            queued += await world.at(text).check(1)
        return queued

    assert await check("2026-11-22 12:30", 0) == []
    assert await check("2026-11-23 02:59", 0) == []
    assert len(await check("2026-11-23 03:00", 0)) == 1
    await nightly.end(await nightly.at("2026-11-23 03:01").begin())
    assert await check("2026-11-23 11:59", 0) == []
    assert len(await check("2026-11-23 12:00", 0)) == 1
    await noon.end(await noon.at("2026-11-23 12:01").begin(), "failed")

    # A failed training is not repeated at every check.
    assert len(await check("2026-11-23 13:00", 150)) == 1
    await noon.end(await noon.begin(), "failed")
    assert await check("2026-11-23 13:01", 150) == []
    assert set(await TriggerRepository(database).last_fired()) == {
        "events", "schedule 0 3 * * *", "schedule 0 12 * * *"
    }  # fmt: skip


async def test_an_overdue_trigger_of_no_worker_is_deleted(database: Database) -> None:
    repository = TriggerRepository(database)
    before = World(database, train_schedule="0 3 1 * *")
    await before.check()
    world = World(database, train_schedule="0 5 * * *")
    for text in ("2026-11-30 00:00", "2026-12-08 02:00"):  # due on the first of December
        await world.at(text).check()
        assert "schedule 0 3 1 * *" in await repository.last_fired()
    await world.at("2026-12-08 04:00").check()
    assert list(await repository.last_fired()) == ["schedule 0 5 * * *"]


async def test_a_new_trigger_by_events_counts_from_the_last_attempt(database: Database) -> None:
    before = World(database, train_schedule="0 3 * * *")
    await before.check()
    before.seq = 500
    [_] = await before.at("2026-11-22 03:00").check()
    await before.end(await before.begin(), "failed")
    world = World(database, train_every=100)
    world.seq = 599
    assert await world.check() == []
    world.seq = 600
    assert len(await world.check()) == 1


@pytest.mark.parametrize("running", [False, True])
async def test_a_cancelled_training_does_not_settle_a_trigger(
    database: Database, *, running: bool
) -> None:
    world = World(database, train_schedule="0 3 * * *")
    await world.check()
    service = JobService(database, world.settings)
    job_id = await service.submit_training(TrainParams())
    assert await world.at("2026-11-22 03:00").check() == []
    if running:
        claim = await world.begin()
        assert await world.at("2026-11-22 03:01").check() == []
        await world.end(claim, "cancelled")
    else:
        await service.cancel(job_id)
    assert len(await world.at("2026-11-22 03:02").check()) == 1


async def test_a_training_that_started_after_a_trigger_was_due_settles_it(
    database: Database,
) -> None:
    world = World(database, train_schedule="0 3 * * *")
    await world.check()
    await JobService(database, world.settings).submit_training(TrainParams())
    assert await world.at("2026-11-22 03:00").check() == []
    await world.at("2026-11-22 03:05").train()
    assert await world.at("2026-11-22 04:00").check() == []
    assert len(await world.at("2026-11-23 03:00").check()) == 1


async def test_a_running_worker_checks_the_triggers(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seqs of a real service, and a model that was trained there."""
    services.settings = settings.model_copy(update={"train_every": 3})
    await add_small_data(services)
    await publish_model(services)
    fire, fired = Triggers.fire, list[str | None]()

    async def recorded(self: Triggers) -> str | None:
        fired.append(await fire(self))
        return fired[-1]

    monkeypatch.setattr(Triggers, "fire", recorded)
    stop = asyncio.Event()
    worker = asyncio.create_task(build_worker(services).run(stop))
    try:
        await until(lambda: bool(fired))
        assert fired[0] is None
        assert (await services.jobs.page(None, 10))[0] == []
    finally:
        stop.set()
        await worker
    await services.events.add_rows([{"user": f"u{n}", "item": "i"} for n in range(3)], 0)
    stop.clear()
    worker = asyncio.create_task(build_worker(services).run(stop))
    try:
        async with asyncio.timeout(30):
            while not (queued := (await services.jobs.page(None, 10))[0]):  # noqa: ASYNC110 - in the database
                await asyncio.sleep(0.05)
    finally:
        stop.set()
        await worker
    assert [job.params["trigger"] for job in queued] == ["events"]
