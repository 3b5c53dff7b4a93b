"""What a worker does beside its jobs, and how the time left of a training is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.core.settings import Settings
from app.jobs import progress as progress_module
from app.jobs.chores import Chore
from app.jobs.progress import USUAL, Clock
from app.jobs.schemas import TrainParams
from app.jobs.worker import Worker
from app.services import Services
from ncr_core.training import Progress
from tests.app.models import QUICK, WorkerHere, add_small_data

pytestmark = pytest.mark.anyio


async def test_chores_are_done_again_and_again_whatever_becomes_of_others(
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

    chores = [Chore("fails", 0.0, fails), Chore("counts", 0.0, counts)]
    stop = asyncio.Event()
    worker = Worker(services.database, services.models, settings, chores)
    running = asyncio.create_task(worker.run(stop))
    await asyncio.wait_for(done.wait(), 30)
    stop.set()
    await asyncio.wait_for(running, 30)


async def test_a_chore_that_hangs_keeps_no_job_waiting_and_no_worker_from_stopping(
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
    chores = [Chore("hangs", 1.0, hangs)]
    worker = WorkerHere(services.database, services.models, settings, chores)
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(300):
        while (await services.jobs.get(job_id)).status != "succeeded":  # noqa: ASYNC110 - there
            await asyncio.sleep(0.1)
    assert not ended.is_set()
    stop.set()
    await asyncio.wait_for(running, 30)
    assert ended.is_set()


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "perf_counter", lambda: self.now)


def test_the_time_left_is_that_of_all_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    time, said = Time(monkeypatch), list[dict[str, Any]]()
    clock = Clock(said.append)
    time.now += 10
    clock.epoch(Progress("train nbpr", 1, 5, 0.123456, 0.25, 40.0))
    # 50 seconds of epochs in all, and what usually comes after them.
    assert said[-1]["eta_s"] == pytest.approx(40 + 50 * sum(USUAL.values()), abs=0.1)
    assert (said[-1]["loss"], said[-1]["ndcg"]) == (0.12346, 0.25)
    time.now += 40
    clock.phase("evaluate")
    assert said[-1]["phase"] == "evaluate"
    assert said[-1]["eta_s"] == pytest.approx(50 * sum(USUAL.values()), abs=0.1)
    time.now += 4
    clock.phase("compare with what is served")
    time.now += 3
    clock.part(1, 6)
    after = USUAL["learn the held-out items"] + USUAL["write checkpoint"]
    assert (said[-1]["epoch"], said[-1]["epochs"]) == (1, 6)
    assert said[-1]["eta_s"] == pytest.approx(15 + 50 * after, abs=0.1)
    clock.end()
    assert clock.seconds == {"train": 50.0, "evaluate": 4.0, "compare with what is served": 3.0}


def test_an_earlier_training_tells_how_long_the_phases_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, said = Time(monkeypatch), list[dict[str, Any]]()
    earlier = {"train": 100.0, "evaluate": 7.0, "learn the held-out items": 2.0}
    clock = Clock(said.append, earlier)
    time.now += 10
    clock.epoch(Progress("train nbpr", 1, 2, 0.5, None, 10.0))
    known = 7 + 2 + 20 * (USUAL["compare with what is served"] + USUAL["write checkpoint"])
    assert said[-1]["eta_s"] == pytest.approx(10 + known, abs=0.1)
