"""Claims of jobs by workers whose clocks differ, and of trainings that have to wait."""

from __future__ import annotations

import time

import pytest

from app.core import tables
from app.jobs import repository
from app.jobs.metrics import JobMetrics
from app.jobs.repository import JobRepository
from app.wiring import Services
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = pytest.mark.anyio

LEASE_US = 30_000_000


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
        for module in (tables, repository):
            patch.setattr(module, "now_us", wrong)
        claim = await jobs.claim("wrong", LEASE_US, 3)
        assert claim is not None
        assert await jobs.heartbeat(claim, LEASE_US, None) is False
    assert await jobs.claim("right", LEASE_US, 3) is None
    with monkeypatch.context() as patch:
        for module in (tables, repository):
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
    monkeypatch.setattr(repository, "IntegrityError", ZeroDivisionError)
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
    assert len(counts) == 12
    assert counts.pop(("train", "queued")) == 1
    assert set(counts.values()) == {0}
