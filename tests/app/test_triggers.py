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
from app.jobs.tables import jobs
from app.jobs.trigger_rows import TriggerRows
from app.jobs.triggers import Triggers
from app.services import Services, worker_of
from tests.app.models import add_small_data, publish_model
from tests.app.patience import until

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

        queue = JobService(self.database, self.settings)
        return Triggers(self.database, self.settings, queue, seq, trained, now=lambda: self.now)

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
        async with self.database.write() as conn:
            began = jobs.update().where(jobs.c.job_id == claim.job_id)
            await conn.execute(began.values(started_at=self.now))
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


async def test_workers_with_other_settings_leave_each_other_alone(database: Database) -> None:
    nightly = World(database, train_schedule="0 3 * * *")
    noon = World(database, train_schedule="0 12 * * *", train_every=100)

    async def look(text: str, seq: int) -> list[str]:
        found = []
        for world in (nightly, noon) * 2:
            world.seq = seq
            found += await world.at(text).look(1)
        return found

    assert await look("2026-11-22 12:30", 0) == []
    assert await look("2026-11-23 02:59", 0) == []
    assert len(await look("2026-11-23 03:00", 0)) == 1
    await nightly.end(await nightly.at("2026-11-23 03:01").begin())
    assert await look("2026-11-23 11:59", 0) == []
    assert len(await look("2026-11-23 12:00", 0)) == 1
    await noon.end(await noon.at("2026-11-23 12:01").begin(), "failed")

    # What fails is not tried again at every look.
    assert len(await look("2026-11-23 13:00", 150)) == 1
    await noon.end(await noon.begin(), "failed")
    assert await look("2026-11-23 13:01", 150) == []
    assert set(await TriggerRows(database).fired()) == {
        "events", "schedule 0 3 * * *", "schedule 0 12 * * *"
    }  # fmt: skip


async def test_a_trigger_that_nobody_looks_after_goes(database: Database) -> None:
    rows = TriggerRows(database)
    before = World(database, train_schedule="0 3 1 * *")
    await before.look()
    world = World(database, train_schedule="0 5 * * *")
    for text in ("2026-11-30 00:00", "2026-12-08 02:00"):  # due on the first of December
        await world.at(text).look()
        assert "schedule 0 3 1 * *" in await rows.fired()
    await world.at("2026-12-08 04:00").look()
    assert list(await rows.fired()) == ["schedule 0 5 * * *"]


async def test_a_trigger_by_events_begins_at_what_was_tried(database: Database) -> None:
    before = World(database, train_schedule="0 3 * * *")
    await before.look()
    before.seq = 500
    [_] = await before.at("2026-11-22 03:00").look()
    await before.end(await before.begin(), "failed")
    world = World(database, train_every=100)
    world.seq = 599
    assert await world.look() == []
    world.seq = 600
    assert len(await world.look()) == 1


@pytest.mark.parametrize("running", [False, True])
async def test_a_training_that_is_cancelled_swallows_nothing(
    database: Database, *, running: bool
) -> None:
    world = World(database, train_schedule="0 3 * * *")
    await world.look()
    queue = JobService(database, world.settings)
    job_id = await queue.submit_training(TrainParams())
    assert await world.at("2026-11-22 03:00").look() == []
    if running:
        claim = await world.begin()
        assert await world.at("2026-11-22 03:01").look() == []
        await world.end(claim, "cancelled")
    else:
        await queue.cancel(job_id)
    assert len(await world.at("2026-11-22 03:02").look()) == 1


async def test_a_training_that_began_after_it_was_due_is_enough(database: Database) -> None:
    world = World(database, train_schedule="0 3 * * *")
    await world.look()
    await JobService(database, world.settings).submit_training(TrainParams())
    assert await world.at("2026-11-22 03:00").look() == []
    await world.at("2026-11-22 03:05").train()
    assert await world.at("2026-11-22 04:00").look() == []
    assert len(await world.at("2026-11-23 03:00").look()) == 1


async def test_the_worker_looks(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seqs of a real service, and a model that was trained there."""
    services.settings = settings.model_copy(update={"train_every": 3})
    await add_small_data(services)
    await publish_model(services)
    fire, looks = Triggers.fire, list[str | None]()

    async def looking(self: Triggers) -> str | None:
        looks.append(await fire(self))
        return looks[-1]

    monkeypatch.setattr(Triggers, "fire", looking)
    stop = asyncio.Event()
    worker = asyncio.create_task(worker_of(services).run(stop))
    try:
        await until(lambda: bool(looks))
        assert looks[0] is None
        assert (await services.jobs.page(0, 10))[0] == []
    finally:
        stop.set()
        await worker
    await services.events.add_rows([{"user": f"u{n}", "item": "i"} for n in range(3)], 0)
    stop.clear()
    worker = asyncio.create_task(worker_of(services).run(stop))
    try:
        async with asyncio.timeout(30):
            while not (found := (await services.jobs.page(0, 10))[0]):  # noqa: ASYNC110 - in the database
                await asyncio.sleep(0.05)
    finally:
        stop.set()
        await worker
    assert [job.params["trigger"] for job in found] == ["events"]


async def test_a_training_says_who_asked(services: Services) -> None:
    job_id = await services.jobs.submit_training(TrainParams())
    assert (await services.jobs.get(job_id)).params["trigger"] == "request"
