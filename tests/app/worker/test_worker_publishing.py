"""Publishing a trained model: over the version it was compared with, or not served."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from app.core.settings import Settings
from app.core.tables import metadata
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import JobRow, TrainParams
from app.registry.checkpoint_store import MARK
from app.registry.schemas import Activation
from app.wiring import Services
from app.worker.child_process import Cancelled, LostJob
from app.worker.worker import Worker
from tests.app.conftest import (
    QUICK,
    LateWorker,
    add_small_data,
    publish_model,
    run_in_thread,
    thread_worker,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LEASE_US = 60_000_000


async def claimed(services: Services) -> Claim:
    await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    claim = await JobRepository(services.database).claim("w", LEASE_US, 3)
    assert claim is not None
    return claim


def summary_of(incumbent: str | None, **gate: Any) -> dict[str, Any]:
    report = {"decision": "published", "finding": "not_worse", "forced": False} | gate
    counts = dict.fromkeys(("trained_seq", "users", "items", "interactions"), 1)
    metrics = {"gate": report | {"incumbent": incumbent}}
    return {"checksum": "", "metrics": metrics, "architecture": {}} | counts


def worker_of(services: Services, *, precompute: bool = False) -> Worker:
    settings = services.settings.model_copy(update={"precompute_users": 10 * precompute})
    return Worker(services.database, services.models, settings)


async def publish(
    services: Services, incumbent: str | None, *, precompute: bool = False, **gate: Any
) -> JobRow:
    """The end of a training whose model was compared with ``incumbent``."""
    claim = await claimed(services)
    version = services.models.new_version()
    await worker_of(services, precompute=precompute).publish_model(
        claim, version, summary_of(incumbent, **gate)
    )
    return await services.jobs.get(claim.job_id)


async def active(services: Services) -> str | None:
    return (await services.models.activation()).version


async def test_a_model_replaces_the_version_it_was_compared_with(services: Services) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    job = await publish(services, first)
    assert await active(services) == job.model_version
    assert (job.metrics or {})["gate"]["served"] is True
    assert "why" not in (job.metrics or {})["gate"]


@pytest.mark.parametrize("finding", ["not_worse", "incumbent_unreadable"])
async def test_a_model_does_not_replace_a_version_rolled_back_to_meanwhile(
    services: Services, finding: str
) -> None:
    await add_small_data(services)
    a, b = await publish_model(services), await publish_model(services, seed=1)
    claim = await claimed(services)
    await services.models.rollback()
    version = services.models.new_version()
    await worker_of(services, precompute=True).publish_model(
        claim, version, summary_of(b, finding=finding)
    )
    assert await active(services) == a
    job = await services.jobs.get(claim.job_id)
    assert (job.status, job.model_version, job.error) == ("succeeded", version, None)
    row = await services.models.get(version)
    assert (row.status, row.activated_at) == ("published", None)
    gate = row.metrics["gate"]
    assert row.metrics == job.metrics
    assert gate["served"] is False
    assert gate["why"] == f"another version became active during the training: {a}"
    jobs, _ = await services.jobs.page(None, 9)
    assert {job.kind for job in jobs} == {"train"}  # no candidates


async def test_a_first_model_does_not_replace_one_activated_meanwhile(services: Services) -> None:
    await add_small_data(services)
    a = await publish_model(services)
    job = await publish(services, None, finding="first")
    assert await active(services) == a
    assert (job.status, (job.metrics or {})["gate"]["served"]) == ("succeeded", False)


async def test_a_forced_model_replaces_any_version_but_a_pinned_one(services: Services) -> None:
    await add_small_data(services)
    await publish_model(services)
    job = await publish(services, None, finding="first", forced=True)
    assert await active(services) == job.model_version
    async with services.database.write() as conn:
        table = metadata.tables["activation"]
        await conn.execute(sa.update(table).values(pinned=True))
    other = await publish(services, job.model_version, forced=True)
    assert await active(services) == job.model_version
    assert "pinned" in (other.metrics or {})["gate"]["why"]
    assert (await services.models.get(str(other.model_version))).status == "published"


async def test_a_cancelled_or_lost_job_publishes_nothing(services: Services) -> None:
    await add_small_data(services)
    claim = await claimed(services)
    worker = worker_of(services)
    version = services.models.new_version()
    await services.jobs.cancel(claim.job_id)
    for decision in ("published", "rejected"):
        with pytest.raises(Cancelled):
            await worker.publish_model(claim, version, summary_of(None, decision=decision))
    with pytest.raises(Cancelled):
        await worker.publish_candidates(claim, version, {})
    with pytest.raises(LostJob):
        await worker.publish_model(claim._replace(owner="other"), version, summary_of(None))
    assert await active(services) is None
    assert (await services.models.page(None, 9))[0] == []
    assert (await services.jobs.get(claim.job_id)).status == "running"  # until the worker ends it


async def test_a_model_whose_commit_was_not_confirmed_is_not_published_again(
    services: Services,
) -> None:
    """As after a connection that was lost in that moment: the second attempt finds it ended."""
    await add_small_data(services)
    claim, version = await claimed(services), services.models.new_version()
    worker = worker_of(services)
    await worker.publish_model(claim, version, summary_of(None, finding="first"))
    with pytest.raises(LostJob):
        await worker.publish_model(claim, version, summary_of(None, finding="first"))
    assert await active(services) == version
    assert (await services.jobs.get(claim.job_id)).status == "succeeded"


async def test_a_job_cancelled_while_its_result_arrives_publishes_nothing(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    worker = LateWorker(
        services, settings, lambda: services.jobs.cancel(job_id), run_task=run_in_thread
    )
    assert await worker.run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, job.model_version) == ("cancelled", None)
    assert await active(services) is None
    assert [path.name for path in (settings.data_dir / "models").iterdir()] == [MARK]


@pytest.mark.parametrize(("times", "attempt"), [(3, 1), (10_000, 2)])
async def test_a_database_that_is_away_while_a_model_is_published_fails_no_job(
    services: Services, settings: Settings, times: int, attempt: int
) -> None:
    """For longer than a lease: another worker takes the job up, when the database is back."""
    await add_small_data(services)
    settings = settings.model_copy(update={"job_lease_seconds": 1.0, "job_poll_seconds": 0.05})
    wanted = TrainParams.model_validate(QUICK | {"force": True})
    job_id = await services.jobs.submit_training(wanted)
    outages = times

    async def database_away() -> None:
        nonlocal outages
        if outages > 0:
            outages -= 1
            raise OperationalError("UPDATE", None, Exception("the connection is closed"))

    with contextlib.suppress(OperationalError):
        await LateWorker(services, settings, database_away, run_task=run_in_thread).run_once()
    job = await services.jobs.get(job_id)
    assert job.status in ("running", "succeeded")
    async with asyncio.timeout(60):
        while (await services.jobs.get(job_id)).status == "running":
            await thread_worker(services, settings).run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, job.attempt, job.error) == ("succeeded", attempt, None)


async def test_a_rollback_during_the_comparison_keeps_the_new_model_from_being_served(
    services: Services, settings: Settings
) -> None:
    """With a real training: what it is compared with is read as the comparison begins."""
    await add_small_data(services)
    a, b = await publish_model(services), await publish_model(services, seed=1)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    loop = asyncio.get_running_loop()
    gone_back: list[Activation] = []

    def on_progress(progress: dict[str, Any]) -> None:
        # In the thread that compares, which waits for it.
        if progress["phase"] == "compare with what is served" and not gone_back:
            rollback = asyncio.run_coroutine_threadsafe(services.models.rollback(), loop)
            gone_back.append(rollback.result(60))

    worker = thread_worker(services, settings)
    assert await worker.run_once(on_progress=on_progress)
    assert [activation.version for activation in gone_back] == [a]
    job = await services.jobs.get(job_id)
    gate = (job.metrics or {})["gate"]
    assert (job.status, gate["incumbent"], gate["served"]) == ("succeeded", b, False)
    assert await active(services) == a
