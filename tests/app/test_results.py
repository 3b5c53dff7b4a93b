"""What becomes of a trained model: published over what it was compared with, or not served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from app.core.metadata import metadata
from app.core.settings import Settings
from app.jobs.outcomes import Cancelled, LostJob
from app.jobs.repository import Claim, JobRepository
from app.jobs.results import Results
from app.jobs.schemas import JobRow, TrainParams
from app.models.schemas import Activation
from app.services import Services
from tests.app.models import QUICK, WorkerHere, add_small_data, publish_model

pytestmark = pytest.mark.anyio

LEASE = 60_000_000


async def claimed(services: Services) -> Claim:
    await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    claim = await JobRepository(services.database).claim("w", LEASE, 3)
    assert claim is not None
    return claim


def summary_of(incumbent: str | None, **gate: Any) -> dict[str, Any]:
    report = {"decision": "published", "finding": "not_worse", "forced": False} | gate
    counts = dict.fromkeys(("trained_seq", "users", "items", "interactions"), 1)
    return {"checksum": "", "metrics": {"gate": report | {"incumbent": incumbent}}} | counts


async def publish(
    services: Services, incumbent: str | None, *, precompute: bool = False, **gate: Any
) -> JobRow:
    """The end of a training whose model was compared with ``incumbent``."""
    claim = await claimed(services)
    results = Results(services.database, services.models, precompute=precompute)
    version = services.models.new_version()
    await results.model(claim, version, summary_of(incumbent, **gate))
    return await services.jobs.get(claim.job_id)


async def active(services: Services) -> str | None:
    return (await services.models.activation()).version


async def test_over_what_it_was_compared_with(services: Services) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    job = await publish(services, first)
    assert await active(services) == job.model_version
    assert (job.metrics or {})["gate"]["served"] is True
    assert "why" not in (job.metrics or {})["gate"]


@pytest.mark.parametrize("finding", ["not_worse", "incumbent_unreadable"])
async def test_not_over_what_was_gone_back_to_meanwhile(services: Services, finding: str) -> None:
    await add_small_data(services)
    a, b = await publish_model(services), await publish_model(services, seed=1)
    claim = await claimed(services)
    await services.models.rollback()
    results = Results(services.database, services.models, precompute=True)
    version = services.models.new_version()
    await results.model(claim, version, summary_of(b, finding=finding))
    assert await active(services) == a
    job = await services.jobs.get(claim.job_id)
    assert (job.status, job.model_version, job.error) == ("succeeded", version, None)
    row = await services.models.get(version)
    assert (row.status, row.activated_at) == ("published", None)
    gate = row.metrics["gate"]
    assert row.metrics == job.metrics
    assert gate["served"] is False
    assert gate["why"] == f"another version was activated meanwhile: {a}"
    assert {one.kind for one in (await services.jobs.page(0, 9))[0]} == {"train"}  # no candidates


async def test_a_first_model_not_over_one_that_came_meanwhile(services: Services) -> None:
    await add_small_data(services)
    a = await publish_model(services)
    job = await publish(services, None, finding="first")
    assert await active(services) == a
    assert (job.status, (job.metrics or {})["gate"]["served"]) == ("succeeded", False)


async def test_by_force_over_anything_but_what_is_pinned(services: Services) -> None:
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


async def test_what_was_cancelled_is_not_published(services: Services) -> None:
    await add_small_data(services)
    claim = await claimed(services)
    results = Results(services.database, services.models, precompute=False)
    version = services.models.new_version()
    await services.jobs.cancel(claim.job_id)
    for decision in ("published", "rejected"):
        with pytest.raises(Cancelled):
            await results.model(claim, version, summary_of(None, decision=decision))
    with pytest.raises(Cancelled):
        await results.candidates(claim, version, {})
    with pytest.raises(LostJob):
        await results.model(claim._replace(owner="other"), version, summary_of(None))
    assert await active(services) is None
    assert (await services.models.page(0, 9))[0] == []
    assert (await services.jobs.get(claim.job_id)).status == "running"  # until the worker ends it


async def test_a_cancel_while_the_result_is_on_its_way(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    model = Results.model

    async def late(self: Results, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        await services.jobs.cancel(job_id)
        await model(self, claim, version, summary)

    monkeypatch.setattr(Results, "model", late)
    assert await WorkerHere(services.database, services.models, settings).run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, job.model_version) == ("cancelled", None)
    assert await active(services) is None
    assert not list((settings.data_dir / "models").iterdir())


async def test_a_rollback_while_models_are_compared(services: Services, settings: Settings) -> None:
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

    worker = WorkerHere(services.database, services.models, settings)
    assert await worker.run_once(on_progress=on_progress)
    assert [activation.version for activation in gone_back] == [a]
    job = await services.jobs.get(job_id)
    gate = (job.metrics or {})["gate"]
    assert (job.status, gate["incumbent"], gate["served"]) == ("succeeded", b, False)
    assert await active(services) == a
