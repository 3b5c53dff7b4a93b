"""Periodic tasks beside a worker's jobs."""

from __future__ import annotations

import asyncio

import pytest

from app.core.settings import Settings
from app.jobs.schemas import TrainParams
from app.wiring import Services
from app.worker.worker import PeriodicTask, Worker
from tests.app.trained_models import QUICK, add_small_data, thread_worker

pytestmark = pytest.mark.anyio


async def test_periodic_tasks_repeat_although_another_one_fails(
    services: Services, settings: Settings
) -> None:
    done = asyncio.Event()
    count = 0

    async def fails() -> None:
        raise RuntimeError("the database is away")

    async def counts() -> None:
        nonlocal count
        count += 1
        if count == 3:
            done.set()

    tasks = [PeriodicTask("fails", 0.0, fails), PeriodicTask("counts", 0.0, counts)]
    stop = asyncio.Event()
    worker = Worker(services.database, services.models, settings, tasks)
    running = asyncio.create_task(worker.run(stop))
    await asyncio.wait_for(done.wait(), 30)
    stop.set()
    await asyncio.wait_for(running, 30)


async def test_a_periodic_task_that_hangs_delays_neither_jobs_nor_the_workers_stop(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    stop = asyncio.Event()
    tasks = [PeriodicTask("hangs", 1.0, hangs)]
    worker = thread_worker(services, settings, periodic_tasks=tasks)
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(300):
        while (await services.jobs.get(job_id)).status != "succeeded":  # noqa: ASYNC110 - there
            await asyncio.sleep(0.1)
    assert not ended.is_set()
    stop.set()
    await asyncio.wait_for(running, 30)
    assert ended.is_set()
