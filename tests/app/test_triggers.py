"""What starts a training by itself, with several workers looking at once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from app.core.database import Database
from app.core.settings import Settings, load_settings
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import JobRow, TrainParams
from app.jobs.service import JobService
from app.jobs.triggers import Triggers
from app.services import Services, worker_of
from tests.app.models import add_small_data, publish_model

pytestmark = pytest.mark.anyio


def microseconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


class World:
    """A database, the time and the number of events; each worker looks by itself."""

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

    async def look(self, workers: int = 3) -> list[str]:
        """All look at the same moment; the jobs that were queued."""
        fired = await asyncio.gather(*(self.worker().fire() for _ in range(workers)))
        return [job_id for job_id in fired if job_id is not None]

    def at(self, text: str) -> World:
        self.now = microseconds(text)
        return self

    async def jobs(self) -> list[JobRow]:
        return await JobRepository(self.database).page(0, 100)

    async def begin(self) -> Claim:
        claim = await JobRepository(self.database).claim("w", 60_000_000, 3)
        assert claim is not None
        return claim

    async def end(self, claim: Claim, status: str = "succeeded") -> None:
        async with self.database.write() as conn:
            assert await JobRepository(self.database).finish(conn, claim, status)

    async def train(self) -> None:
        claim = await self.begin()
        self.trained = self.seq
        await self.end(claim)


async def test_nothing_is_set(database: Database) -> None:
    world = World(database)
    world.seq = 10**6
    assert await world.look() == []


async def test_a_schedule_fires_once_however_many_look(database: Database) -> None:
    world = World(database, train_schedule="30 3 * * *")
    assert await world.at("2026-11-22 12:00").look() == []  # what was before it was set is past
    assert await world.at("2026-11-23 03:29:59").look() == []
    [job_id] = await world.at("2026-11-23 03:30").look()
    [job] = await world.jobs()
    assert (job.job_id, job.params["trigger"], job.status) == (job_id, "schedule", "queued")
    assert await world.look() == []
    await world.train()
    assert await world.at("2026-11-24 03:00").look() == []
    assert len(await world.at("2026-11-24 03:31").look()) == 1


async def test_what_was_missed_while_nobody_was_there_fires_once(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *")
    await world.look()
    assert len(await world.at("2026-11-29 00:30").look()) == 1  # after a week
    await world.train()
    assert await world.look() == []


async def test_nothing_is_queued_beside_a_training(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *", train_every=10)
    await world.look()
    await JobService(database, world.settings).submit_training(TrainParams())
    world.seq = 50
    assert await world.at("2026-11-22 01:00").look() == []  # that one will read all there is
    claim = await world.begin()
    assert await world.at("2026-11-22 01:30").look() == []

    # What falls due while it runs has not been read by it, and waits for its end.
    world.trained = 50
    assert await world.at("2026-11-22 02:00").look() == []
    await world.end(claim)
    assert len(await world.at("2026-11-22 02:10").look()) == 1
    await world.train()
    assert await world.look() == []


async def test_by_the_number_of_new_events(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = 99
    assert await world.look() == []
    world.seq = 100
    [_] = await world.look()
    world.seq = 130
    assert (await world.jobs())[0].params["trigger"] == "events"
    await world.train()  # has learned from 130
    world.seq = 229
    assert await world.look() == []
    world.seq = 230
    assert len(await world.look()) == 1


async def test_a_training_that_was_asked_for_counts_too(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = world.trained = 90
    assert await world.look() == []
    world.seq = 189
    assert await world.look() == []


async def test_a_training_that_fails_is_not_tried_for_ever(database: Database) -> None:
    world = World(database, train_every=100)
    world.seq = 100
    [_] = await world.look()
    await world.end(await world.begin(), "failed")
    assert await world.look() == []
    world.seq = 200
    assert len(await world.look()) == 1


async def test_both_at_once_are_one_training(database: Database) -> None:
    world = World(database, train_schedule="0 * * * *", train_every=10)
    await world.look()
    world.seq = 10
    assert len(await world.at("2026-11-22 01:00").look(workers=6)) == 1
    await world.train()
    assert await world.look() == []


async def test_another_schedule_has_missed_nothing(database: Database) -> None:
    before = World(database, train_schedule="0 3 * * *")
    await before.look()
    world = World(database, train_schedule="0 5 * * *")
    assert await world.at("2026-11-23 06:00").look() == []
    assert len(await world.at("2026-11-24 05:00").look()) == 1


async def test_the_worker_looks(services: Services, settings: Settings) -> None:
    """With the seqs of a real service, and a model that was trained there."""
    services.settings = settings.model_copy(update={"train_every": 3})
    await add_small_data(services)
    await publish_model(services)
    stop = asyncio.Event()
    worker = asyncio.create_task(worker_of(services).run(stop))
    try:
        await asyncio.sleep(1)
        assert (await services.jobs.page(0, 10))[0] == []
    finally:
        stop.set()
        await worker
    await services.events.add_rows([{"user": f"u{n}", "item": "i"} for n in range(3)], 0)
    stop.clear()
    worker = asyncio.create_task(worker_of(services).run(stop))
    try:
        async with asyncio.timeout(30):
            while not (jobs := (await services.jobs.page(0, 10))[0]):  # noqa: ASYNC110 - in the database
                await asyncio.sleep(0.05)
    finally:
        stop.set()
        await worker
    assert [job.params["trigger"] for job in jobs] == ["events"]


async def test_a_training_says_who_asked(services: Services) -> None:
    job_id = await services.jobs.submit_training(TrainParams())
    assert (await services.jobs.get(job_id)).params["trigger"] == "request"
