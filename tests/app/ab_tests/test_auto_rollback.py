"""Automatic rollback: when it happens, when not, and its record in the history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from app.ab_tests.auto_rollback import AutoRollback
from app.all_tables import metadata
from app.core.ids import hour_now
from app.core.settings import Settings
from app.core.tables import now_us
from app.wiring import Services, build_services
from app.worker.worker import build_worker
from tests.app.ab_tests.conftest import execute, list_id
from tests.app.conftest import add_small_data, publish_model, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("one_hour")]

HOUR_US = 3_600_000_000
PER_HOUR = 50


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[Services]:
    """With a hundred lists as enough, so that there is not much to write."""
    services = await build_services(settings.model_copy(update={"return_lists": 100}))
    yield services
    await services.close()


@pytest.fixture
async def versions(services: Services) -> tuple[str, str]:
    """The one before, and the one that training has just published, twenty hours ago."""
    await add_small_data(services)
    first = await publish_model(services, seed=1)
    second = await publish_model(services, seed=2)
    await published(services, second, hours_ago=20)
    return first, second


async def published(services: Services, version: str, hours_ago: int) -> None:
    changes = metadata.tables["activations"]
    at = (hour_now() - hours_ago) * HOUR_US
    await execute(services, changes.update().where(changes.c.version == version).values(at=at))


async def given_out(
    services: Services, version: str, hours: range, clicked: int, late: bool = False
) -> None:
    """Lists in some hours, counted back from now, with so many clicked in each; the clicks came at
    once, or ``late``: just now.
    """
    now = hour_now()
    served, events = metadata.tables["served"], metadata.tables["events"]
    lists = [{"version": version, "hour": now - ago, "lists": PER_HOUR} for ago in hours]
    rows = [
        {"event_id": f"{version} {ago} {n}", "user": f"user-{n}", "item": "film-1",
         "recommendation_id": list_id(version, now - ago, n)}
        for ago in hours for n in range(clicked)
    ]  # fmt: skip
    if rows:
        assert (await services.events.add_rows(rows, 0)).accepted == len(rows)
    await execute(services, served.insert().values(lists))
    if not late:
        by_hour = [
            events.update()
            .where(
                events.c.event_id >= f"{version} {ago} ", events.c.event_id < f"{version} {ago}!"
            )
            .values(created_at=(now - ago) * HOUR_US + HOUR_US // 2)
            for ago in hours
        ]
        await execute(services, *by_hour)


def rollback(services: Services) -> AutoRollback:
    return AutoRollback(
        services.database, services.models, services.trials.click_through, services.settings
    )


async def history(services: Services) -> list[Mapping[str, Any]]:
    changes, _ = await services.models.history()
    return [change._asdict() for change in changes]


WEEK = range(20, 21 + 7 * 24)  # hours ago
DAY = range(2, 20)


async def test_a_significant_drop_rolls_back_and_records_why(
    services: Services, versions: tuple[str, str]
) -> None:
    first, second = versions
    await given_out(services, first, WEEK, 12)
    await given_out(services, second, DAY, 3)
    active = await rollback(services).check()
    assert active is not None
    assert active.version == first
    last = (await history(services))[0]
    assert (last["version"], last["previous"], last["reason"]) == (first, second, "returned")
    detail = last["detail"]
    assert detail["from"] == second
    assert detail["lists"] == PER_HOUR * len(DAY)
    assert detail["clicked"] == 3 * len(DAY)
    assert detail["expected"] == pytest.approx(12 * len(DAY))
    assert detail["fall"] == pytest.approx(0.75)
    assert 0 < detail["p"] < 0.01
    # Once is enough, for any number of workers.
    assert await rollback(services).check() is None
    assert len(await history(services)) == 3


@pytest.mark.parametrize("clicked", [12, 11, 14])
async def test_no_rollback_without_a_drop(
    services: Services, versions: tuple[str, str], clicked: int
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], DAY, clicked)
    assert await rollback(services).check() is None
    assert (await services.models.activation()).version == versions[1]


async def test_no_rollback_with_too_few_lists(
    services: Services, versions: tuple[str, str]
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], range(18, 19), 0)
    assert await rollback(services).check() is None


async def test_lists_count_only_after_the_waiting_time(
    services: Services, versions: tuple[str, str]
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], range(2), 0)
    assert await rollback(services).check() is None
    # Even if they are many.
    served = metadata.tables["served"]
    version = served.c.version == versions[1]
    await execute(services, served.update().where(version).values(lists=100_000))
    assert await rollback(services).check() is None
    assert await rollback(services).check(hour_now() + 2) is not None


async def test_late_clicks_count_for_neither_version(
    services: Services, versions: tuple[str, str]
) -> None:
    """Old lists have had longer to be clicked: what came late does not count for them either."""
    await given_out(services, versions[0], WEEK, 12, late=True)
    await given_out(services, versions[1], DAY, 3)
    assert await rollback(services).check() is None


@pytest.mark.parametrize("by_hand", ["pinned", "activated", "rolled_back", "twice"])
async def test_no_rollback_of_a_version_that_an_administrator_chose(
    services: Services, versions: tuple[str, str], by_hand: str
) -> None:
    first, second = versions
    await given_out(services, first, WEEK, 12)
    await given_out(services, second, DAY, 3)
    if by_hand == "pinned":
        await services.models.activate(second, pin=True)
    elif by_hand == "activated":
        await services.models.activate(first)
        await services.models.activate(second)
        await published(services, second, hours_ago=20)
    elif by_hand == "rolled_back":
        await services.models.rollback()
    else:
        await rollback(services).check()
    before = await services.models.activation()
    assert await rollback(services).check() is None
    assert await services.models.activation() == before


async def test_a_version_is_watched_again_once_it_is_unpinned(
    services: Services, versions: tuple[str, str]
) -> None:
    first, second = versions
    await given_out(services, first, WEEK, 12)
    await given_out(services, second, DAY, 3)
    await services.models.activate(second, pin=True)
    await services.models.unpin()
    changes = metadata.tables["activations"]
    is_pinning = changes.c.previous == changes.c.version
    await execute(services, changes.update().where(is_pinning).values(at=now_us()))
    active = await rollback(services).check()
    assert active is not None
    assert active.version == first


async def test_hours_of_interleaving_trials_do_not_count(
    services: Services, versions: tuple[str, str]
) -> None:
    """A version's own lists are then those of others than usual."""
    first, second = versions
    await given_out(services, first, WEEK, 12)
    await given_out(services, second, range(8, 20), 12)
    await given_out(services, second, range(2, 8), 0)
    now = hour_now()
    trials = metadata.tables["trials"]
    trial = {"trial_id": "t", "kind": "interleaving", "version_a": second, "version_b": first,
             "share": 0.5, "status": "ended", "created_at": (now - 7) * HOUR_US - 1,
             "ended_at": (now - 2) * HOUR_US + 1, "report": {}}  # fmt: skip
    await execute(services, trials.insert().values(trial))
    assert await rollback(services).check() is None
    await execute(services, trials.delete())
    assert await rollback(services).check() is not None


async def test_no_rollback_to_a_version_with_deleted_files(
    services: Services, versions: tuple[str, str]
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], DAY, 3)
    models = metadata.tables["models"]
    gone = models.update().where(models.c.version == versions[0]).values(status="deleted")
    await execute(services, gone)
    assert await rollback(services).check() is None
    assert (await services.models.activation()).version == versions[1]


async def test_no_rollback_long_after_the_publication(
    services: Services, versions: tuple[str, str]
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], DAY, 3)
    assert await rollback(services).check(hour_now() + 30 * 24) is None
    assert await rollback(services).check(hour_now() + 7 * 24) is not None


async def test_no_rollback_without_an_earlier_version(services: Services) -> None:
    assert await rollback(services).check() is None
    await add_small_data(services)
    await publish_model(services)
    assert await rollback(services).check() is None


async def test_the_drop_setting_disables_or_limits_the_rollback(
    settings: Settings, services: Services, versions: tuple[str, str]
) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], DAY, 3)
    off = await build_services(
        settings.model_copy(update={"return_lists": 100, "return_drop": 0.0})
    )
    less = await build_services(
        settings.model_copy(update={"return_lists": 100, "return_drop": 0.8})
    )
    try:
        assert await rollback(off).check() is None
        assert await rollback(less).check() is None
    finally:
        await off.close()
        await less.close()
    assert await rollback(services).check() is not None


async def test_the_worker_rolls_back(services: Services, versions: tuple[str, str]) -> None:
    await given_out(services, versions[0], WEEK, 12)
    await given_out(services, versions[1], DAY, 3)
    stop = asyncio.Event()
    worker = asyncio.create_task(build_worker(services).run(stop))

    async def returned() -> bool:
        return (await services.models.activation()).version == versions[0]

    await until(returned)
    stop.set()
    await worker
