"""The worker: jobs in child processes, and periodic tasks beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from app import main
from app.core.settings import Settings
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import JobRow, Task, TrainParams
from app.jobs.tables import jobs
from app.registry.checkpoint_store import MARK
from app.wiring import Services
from app.worker.child_process import Heartbeat, Stopped
from app.worker.worker import AWAY_LEASES, PeriodicTask, Worker, build_worker
from benchmarks.faults.setup import LONG_TRAINING
from tests.app.conftest import (
    QUICK,
    add_small_data,
    children,
    run_job,
    run_job_here,
    thread_worker,
    until,
)
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_a_job_trains_and_publishes_a_model(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    await services.catalog.delete("film-1")
    seen: list[dict[str, Any]] = []
    job_id = await services.jobs.submit_training(
        # By force: two epochs are too few to be as good as the popularity list.
        TrainParams.model_validate(QUICK | {"model": "neupr", "seed": 5, "force": True})
    )
    worker = Worker(services.database, services.models, settings)
    assert await worker.run_once(on_progress=seen.append)
    assert not await worker.run_once()  # nothing is left to do

    job = await services.jobs.get(job_id)
    assert (job.status, job.error, job.attempt) == ("succeeded", None, 1)
    assert job.progress is not None
    assert [p["phase"] for p in seen if p["epoch"] <= 1] == [
        "read events", "pre-train nbpr", "pre-train dncr", "train neupr", "evaluate",
        "learn the held-out items", "learn from attributes",
        "write checkpoint",
    ]  # fmt: skip
    activation = await services.models.activation()
    assert activation.version == job.model_version
    row = await services.models.get(str(job.model_version))
    assert (row.kind, row.factors, row.job_id) == ("neupr", 4, job_id)
    assert row.trained_seq == await services.events.last_seq()
    assert row.metrics == job.metrics
    checkpoint = await services.models.load(row, "cpu")
    assert len(checkpoint.user_ids) == row.users == 60
    assert "film-1" not in checkpoint.item_ids  # deleted items are not learned


@pytest.mark.slow
@ON_POSTGRESQL  # which gives rows in whatever order it likes
async def test_the_same_events_and_seed_give_the_same_model(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    one, two = [await run_job(services, settings, seed=3) for _ in range(2)]
    assert figures(one) == figures(two)
    gate = (two.metrics or {})["gate"]
    assert (gate["finding"], gate["incumbent"]) == ("not_worse", one.model_version)
    assert gate["ndcg@10"]["difference"] == 0  # as served before it learned what is held out
    assert gate["users"] == 60
    first, second = [
        (await services.models.load(await services.models.get(str(j.model_version)), "cpu"))
        for j in (one, two)
    ]
    assert first.user_ids == [f"user-{n}" for n in range(1, 61)]  # as they came in
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.slow
@ON_SQLITE
async def test_training_without_events_fails_with_one_line(
    services: Services, settings: Settings
) -> None:
    job = await run_job(services, settings)
    assert job.status == "failed"
    assert "training needs events" in str(job.error)
    assert (await services.models.activation()).version is None


@pytest.mark.slow
@ON_SQLITE
@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([("only", f"i{n}") for n in range(9)], "1 user is too few"),
        ([(f"u{n}", "i") for n in range(9)], "no user has 3 items"),
    ],
)
async def test_training_on_too_little_fails_with_one_line(
    services: Services, settings: Settings, pairs: list[tuple[str, str]], says: str
) -> None:
    await services.events.add_rows([{"user": user, "item": item} for user, item in pairs], 0)
    job = await run_job_here(services, settings)
    assert job.status == "failed"
    assert says in str(job.error)


@pytest.mark.slow
@ON_SQLITE
async def test_min_interactions_that_leave_nothing_fail_with_one_line(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job = await run_job_here(services, settings, min_interactions=1000)
    assert job.status == "failed"
    assert "no item has 1000 interactions" in str(job.error)


@pytest.mark.slow
@ON_SQLITE
async def test_cancelling_a_running_training_ends_its_process_and_leaves_no_files(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | LONG_TRAINING))
    started = asyncio.Event()
    worker = Worker(services.database, services.models, settings)
    running = asyncio.create_task(
        worker.run_once(on_progress=lambda p: started.set() if p["epoch"] else None)
    )
    await asyncio.wait_for(started.wait(), 60)
    assert (await services.jobs.get(job_id)).status == "running"
    await services.jobs.cancel(job_id)
    assert await asyncio.wait_for(running, 20)
    job = await services.jobs.get(job_id)
    assert job.status == "cancelled"
    assert job.finished_at is not None
    assert not children()
    assert [path.name for path in settings.data_dir.glob("models/*")] == [MARK]


@pytest.mark.slow
@ON_SQLITE
async def test_a_stopping_worker_requeues_its_job(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | LONG_TRAINING))
    stop = asyncio.Event()
    worker = Worker(services.database, services.models, settings)
    running = asyncio.create_task(worker.run(stop))
    while (await services.jobs.get(job_id)).progress is None:  # noqa: ASYNC110 - in the database
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(running, 20)
    job = await services.jobs.get(job_id)
    assert (job.status, job.attempt, job.owner) == ("queued", 0, None)
    assert not children()


@ON_SQLITE
async def test_a_job_is_given_back_although_the_stop_takes_too_long(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await services.jobs.submit_training(TrainParams())
    giving_back, requeue = asyncio.Event(), JobRepository.requeue

    async def stopped(*_: object) -> dict[str, Any]:
        raise Stopped

    async def slow(self: JobRepository, claim: Claim) -> None:
        giving_back.set()
        await asyncio.sleep(0.05)
        await requeue(self, claim)

    monkeypatch.setattr(JobRepository, "requeue", slow)
    worker = Worker(services.database, services.models, settings, run_task=stopped)
    running = asyncio.create_task(worker.run_once())
    await giving_back.wait()
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    job = await services.jobs.get(job_id)
    assert (job.status, job.attempt, job.owner) == ("queued", 0, None)


@pytest.mark.slow
@ON_SQLITE
async def test_a_child_ignores_stop_signals_and_a_killed_one_fails_with_one_line(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | LONG_TRAINING))
    epochs: asyncio.Queue[int] = asyncio.Queue()
    worker = Worker(services.database, services.models, settings)
    running = asyncio.create_task(
        worker.run_once(on_progress=lambda p: epochs.put_nowait(p["epoch"]))
    )
    async with asyncio.timeout(60):
        while not await epochs.get():
            pass
        (child,) = children()
        assert os.getsid(child) == child  # no signal to the worker's group, no Ctrl-C reaches it
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
            while not epochs.empty():
                epochs.get_nowait()
            await epochs.get()
        os.kill(child, signal.SIGKILL)  # as the kernel does when memory runs out
        assert await running
    job = await services.jobs.get(job_id)
    assert (job.status, job.attempt) == ("failed", 1)
    assert job.error == "SIGKILL ended the job's process: the machine may lack memory for it"


class Leases:
    """A worker's job without a process: when its child would have to exit, at each heartbeat."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slow, self.away = 1000.0, 0.0, 0
        self.exit_at: list[float] = []
        heartbeat, claim = JobRepository.heartbeat, JobRepository.claim

        async def slow_claim(*arguments: Any) -> Claim | None:
            self.now += self.slow
            return await claim(*arguments)

        async def slow_heartbeat(*arguments: Any) -> bool | None:
            self.now += self.slow
            if self.away:
                self.away -= 1
                raise OperationalError("UPDATE", None, Exception("gone"))
            return await heartbeat(*arguments)

        monkeypatch.setattr("app.worker.worker.clock", lambda: self.now)
        monkeypatch.setattr(JobRepository, "claim", slow_claim)
        monkeypatch.setattr(JobRepository, "heartbeat", slow_heartbeat)

    async def run(
        self, task: Task, heartbeat: Heartbeat, seconds: float, *_: Any
    ) -> dict[str, Any]:
        """Heartbeats until one of them raises."""
        self.exit_at = [task.exit_at]
        while len(self.exit_at) < 1000:
            self.exit_at.append(await heartbeat(None))
            self.now += seconds
        raise AssertionError("no heartbeat has raised")


async def test_a_child_may_go_on_for_less_than_the_lease_from_before_its_last_renewal_began(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"job_lease_seconds": 10.0})
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    leases = Leases(monkeypatch)
    leases.slow = 3.0  # a database under load: the lease begins somewhere within
    run = leases.run

    async def cancelled(*arguments: Any) -> dict[str, Any]:
        await services.jobs.cancel(job_id)
        return await run(*arguments)

    worker = Worker(services.database, services.models, settings, run_task=cancelled)
    assert await worker.run_once()
    assert leases.exit_at == [1008.0]
    assert (await services.jobs.get(job_id)).status == "cancelled"

    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    leases.now = 1000.0
    worker = Worker(services.database, services.models, settings, run_task=run)
    other = Worker(services.database, services.models, settings)
    beats = 0

    async def lost(claim: Claim, lease: Any, progress: Any) -> float:
        nonlocal beats
        beats += 1
        if beats == 3:  # another worker has the job
            async with services.database.write() as conn:
                await conn.execute(jobs.update().values(owner=other._owner, attempt=2))
        return await Worker._heartbeat(worker, claim, lease, progress)

    monkeypatch.setattr(worker, "_heartbeat", lost)
    assert await worker.run_once()
    assert leases.exit_at == [1008.0, 1011.0, 1016.0]  # 3 s a renewal, 2 s between two
    assert beats == 3


async def test_a_child_outlives_an_outage_of_the_database_and_not_an_endless_one(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While only this worker is cut off, another one may train: the time for that is bounded."""
    lease = 3.0
    settings = settings.model_copy(update={"job_lease_seconds": lease})
    await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    leases = Leases(monkeypatch)
    worker = Worker(services.database, services.models, settings, run_task=leases.run)
    leases.away = 25  # 25 s, and the lease is renewed again
    start = leases.now
    heartbeat = JobRepository.heartbeat
    renewed: list[float] = []

    async def then_away_for_good(*arguments: Any) -> bool | None:
        cancel = await heartbeat(*arguments)
        renewed.append(leases.now)
        leases.away = 1000
        return cancel

    monkeypatch.setattr(JobRepository, "heartbeat", then_away_for_good)
    assert await worker.run_once()
    assert renewed == [start + 25]
    assert leases.exit_at[-1] <= start + 25 + (AWAY_LEASES + 1) * lease
    (job,), _ = await services.jobs.page(None, 1)
    assert (job.status, job.attempt, job.lease_until) == ("running", 1, 0)  # to be taken up


@ON_SQLITE
async def test_a_job_whose_child_is_stopped_at_its_start_is_taken_up_again(
    services: Services, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = tmp_path / "stopped"
    stopped.write_text("#!/bin/sh\nkill -TERM $$\n")
    stopped.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stopped))
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    worker = Worker(services.database, services.models, settings)
    for attempt in (1, 2, 3):
        assert await worker.run_once()
        job = await services.jobs.get(job_id)
        assert (job.status, job.attempt, job.error) == ("running", attempt, None)
    assert not await worker.run_once()  # each was an attempt: it is not started for ever
    assert (await services.jobs.get(job_id)).status == "failed"


@pytest.mark.slow
@ON_SQLITE
async def test_a_job_fails_after_its_worker_was_suspended_three_times(
    services: Services, settings: Settings
) -> None:
    """As on a machine that sleeps, or is too slow for the job: the lease is over each time."""
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | LONG_TRAINING))
    slow = settings.model_copy(update={"job_lease_seconds": 1.0})
    worker = Worker(services.database, services.models, slow)

    def stand_still(_: dict[str, Any]) -> None:
        """Until the training has given up."""
        until = time.monotonic() + 60
        while children():
            assert time.monotonic() < until, "the training outlived its lease"
            time.sleep(0.05)

    for attempt in (1, 3):
        assert await worker.run_once(on_progress=stand_still)
        job = await services.jobs.get(job_id)
        assert (job.status, job.attempt) == ("running", attempt)  # until somebody takes it up
        if attempt == 1:  # the second time is like the first
            async with services.database.write() as conn:
                await conn.execute(jobs.update().values(attempt=2))
    assert not await worker.run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, job.error) == (
        "failed",
        "the worker of the job disappeared or stalled 3 times",
    )
    assert not children()
    assert [path.name for path in settings.data_dir.glob("models/*")] == [MARK]


def figures(job: JobRow) -> dict[str, Any]:
    return {
        k: v for k, v in (job.metrics or {}).items() if k not in ("gate", "seconds", "peak_bytes")
    }


@pytest.mark.slow
async def test_stored_params_of_another_version_fail_with_one_line(
    services: Services, settings: Settings
) -> None:
    job_id = await services.jobs.submit_training(TrainParams())
    async with services.database.write() as conn:
        await conn.execute(jobs.update().values(params={"model": "nbpr", "optimizer": "adam"}))
    assert await Worker(services.database, services.models, settings).run_once()
    job = await services.jobs.get(job_id)
    assert job.status == "failed"
    assert (
        job.error
        == "the parameters of the job are not valid: optimizer: Extra inputs are not permitted"
    )


async def test_periodic_tasks_repeat_although_another_one_fails(
    services: Services, settings: Settings
) -> None:
    done = asyncio.Event()
    count = 0

    async def fails() -> None:
        raise RuntimeError("the database is unavailable")

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


@ON_SQLITE
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


@ON_SQLITE
async def test_a_worker_that_runs_touches_its_file(
    services: Services, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    monkeypatch.setattr("app.worker.worker.ALIVE_SECONDS", 0.01)
    services.settings = settings.model_copy(update={"worker_alive_file": alive})
    stop = asyncio.Event()
    working = asyncio.create_task(build_worker(services).run(stop))
    await until(alive.exists)
    alive.unlink()
    await until(alive.exists)
    stop.set()
    await working
    alive.unlink()
    await asyncio.sleep(0.05)
    assert not alive.exists()


@ON_SQLITE
async def test_a_server_gives_its_job_back_before_it_closes_the_database(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    class SlowWorker:
        async def run(self, stop: asyncio.Event) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                steps.append("given back")

    async def close(self: Services) -> None:
        steps.append("closed")
        await original(self)

    original = Services.close
    monkeypatch.setattr(Services, "close", close)
    monkeypatch.setattr(main, "build_worker", lambda services: SlowWorker())
    monkeypatch.setattr(main, "WORKER_STOP_SECONDS", 0.01)
    app = main.create_app(settings, with_worker=True)
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0.01)
    assert steps == ["given back", "closed"]
