"""Submitting and cancelling jobs, and the params that a training is stored with."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.database import Database
from app.core.errors import Conflict
from app.core.settings import Settings
from app.jobs.repository import JobRepository
from app.jobs.schemas import TrainParams
from app.jobs.service import JobService

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
    with pytest.raises(Conflict, match="ended already: succeeded"):
        await service.cancel(job_id)


async def test_history_models_have_defaults_of_their_own(database: Database) -> None:
    async def stored(settings: Settings, **body: Any) -> tuple[Any, ...]:
        service = JobService(database, settings)
        job_id = await service.submit_training(TrainParams.model_validate(body))
        params = (await service.get(job_id)).params
        return params["users"], params["epochs"], params["learning_rate"]

    free, history = Settings(), Settings(default_users="history")
    assert await stored(free) == ("free", 15, 0.01)
    assert await stored(free, users="history") == ("history", 6, 0.005)
    assert await stored(free, users="history", epochs=2) == ("history", 2, 0.005)
    assert await stored(history) == ("history", 6, 0.005)
    assert await stored(history, users="free") == ("free", 15, 0.01)


async def test_a_requested_training_says_so(database: Database) -> None:
    service = JobService(database, Settings())
    job_id = await service.submit_training(TrainParams())
    assert (await service.get(job_id)).params["trigger"] == "request"
