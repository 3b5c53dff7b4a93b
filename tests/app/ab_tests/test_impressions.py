"""The buffer of impressions, click-through, and the metrics of both."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestRow
from app.ab_tests.tables import trial_lists
from app.all_tables import metadata
from app.core.database import Database
from app.core.ids import hour_now, new_recommendation_id
from app.core.settings import Settings
from app.core.tables import now_us
from app.events.click_attribution import ClickAttribution
from app.wiring import Services, build_services
from tests.app.ab_tests.conftest import begin, click, execute, list_id, rows, running
from tests.app.conftest import until
from tests.conftest import ON_POSTGRESQL

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_hour")]

HOUR_US = 3_600_000_000


async def test_lists_of_several_servers_add_up(settings: Settings, services: Services) -> None:
    another = await build_services(settings)
    for each in (services, another):
        each.trials.impressions.add_lists("v-1")
        each.trials.impressions.add_lists("v-1", 4)
        each.trials.impressions.add_lists("v-2")
    await asyncio.gather(services.trials.flush(), another.trials.flush())
    services.trials.impressions.add_lists("v-1")
    assert (await services.trials.click_through.total("v-1")).lists == 11
    assert (await another.trials.click_through.total("v-1")).lists == 10  # not written yet
    await another.close()
    await services.trials.close()
    stored = {(row["version"], row["hour"]): row["lists"] for row in await rows(services, "served")}
    assert sum(n for (version, _), n in stored.items() if version == "v-1") == 11
    assert sum(n for (version, _), n in stored.items() if version == "v-2") == 2
    assert {hour for _, hour in stored} == {hour_now()}


async def test_lists_are_written_in_the_background(
    settings: Settings, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ab_tests.service.WRITE_SECONDS", 0.01)
    await services.trials.start()
    services.trials.impressions.add_lists("v", 3)

    async def there() -> bool:
        return bool(await rows(services, "served"))

    await until(there)
    assert (await services.trials.click_through.total("v")).lists == 3


async def test_close_writes_the_rest(settings: Settings, services: Services) -> None:
    another = await build_services(settings)
    await another.trials.start()
    another.trials.impressions.add_lists("v", 7)
    await another.close()
    assert (await services.trials.click_through.total("v")).lists == 7


async def test_nothing_is_lost_while_the_database_is_away(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = await begin(client, versions[0])
    trials = served.trials
    trials.impressions.add_lists("v", 2)
    assert trials.shadow is not None
    trials.shadow.record(running(trials), [1], [1])
    names = [new_recommendation_id(begun["trial_id"]) for _ in range(3)]
    for name in names:
        trials.interleaving.record(name, running(trials), None, [1], [2])

    async def away(*_: Any) -> None:
        raise OperationalError("INSERT", {}, OSError("away"))

    with monkeypatch.context() as patch:
        for method in ("add_impressions", "add_lists", "add_sums"):
            patch.setattr(ABTestRepository, method, away)
        for _ in range(2):
            with pytest.raises(OperationalError):
                await trials.impressions.write_impressions()
            with pytest.raises(OperationalError):
                await trials.impressions.write_counts()
        trials.impressions.add_lists("v", 1)
    await trials.flush()
    assert [row["recommendation_id"] for row in await rows(served, "impressions")] == sorted(names)
    assert (await trials.click_through.total("v")).lists == 3
    sums = {row["name"]: row["value"] for row in await rows(served, "trial_sums")}
    assert sums == {"requests": 1, "overlap": 1, "same_first": 1, "rbo": pytest.approx(1)}


async def test_too_many_impressions_are_dropped_and_counted(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.ab_tests.impressions.MAX_IMPRESSIONS", 4)
    monkeypatch.setattr("app.ab_tests.impressions.GROUP_ROWS", 3)
    await begin(client, versions[0])
    trials = served.trials
    for n in range(6):
        trials.interleaving.record(f"r-{n}", running(trials), None, [1], [2])
    await trials.flush()
    written = await rows(served, "impressions")
    assert [row["recommendation_id"] for row in written] == ["r-0", "r-1", "r-2", "r-3"]
    assert written[0]["teams"] == {"a": [1], "b": [2]}
    found = await scrape(client)
    assert found["ncr_interleaved_lists_total", "recorded"] == 4
    assert found["ncr_interleaved_lists_total", "dropped"] == 2
    trials.interleaving.record("r-6", running(trials), None, [1], [2])
    await trials.flush()
    assert len(await rows(served, "impressions")) == 5


async def test_impressions_of_old_trials_are_deleted_and_reports_kept(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.ab_tests.service.DELETE_ROWS", 2)
    trials, ended = served.trials, []
    for _ in range(2):
        begun = await begin(client, versions[0])
        for n in range(5):
            trials.interleaving.record(f"{begun['trial_id']}.{n}", running(trials), None, [1], [2])
        ended.append(await trials.end(begun["trial_id"]))
    await trials.delete_old_impressions()
    assert len(await rows(served, "impressions")) == 10
    table = metadata.tables["trials"]
    a_month = now_us() - 31 * 86_400_000_000
    first = table.c.trial_id == ended[0].trial_id
    await execute(served, table.update().where(first).values(ended_at=a_month))
    await trials.delete_old_impressions()
    left = {row["trial_id"] for row in await rows(served, "impressions")}
    assert left == {ended[1].trial_id}
    assert (await trials.get(ended[0].trial_id)).report == ended[0].report


async def test_click_through_counts_each_list_of_the_version_once(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    url = f"/admin/models/{active}"
    none = {"lists": 0, "clicked": 0, "rate": None}
    assert (await client.get(url)).json()["click_through"] == none
    served.trials.impressions.add_lists(active, 8)
    served.trials.impressions.add_lists(other, 2)
    first, second, theirs = (new_recommendation_id(version) for version in (active, active, other))
    for name, item in (
        (first, "film-1"),
        (first, "film-2"),
        (second, "film-1"),
        (theirs, "film-1"),
    ):
        await click(served, "user-1", item, name)
    # What is not an id of a list of this version, though it looks a bit like it.
    for name in (
        active,
        f"{active}.",
        f"{active}.x",
        f"{first}0",
        f"{active}0{first}",
        f"x{first}",
    ):
        await click(served, "user-1", "film-3", name)
    found = (await client.get(url)).json()["click_through"]
    assert found == {"lists": 8, "clicked": 2, "rate": 0.25}
    found = (await client.get(f"/admin/models/{other}")).json()["click_through"]
    assert found == {"lists": 2, "clicked": 1, "rate": 0.5}


async def test_clicks_by_hour(services: Services) -> None:
    now = hour_now()
    hours = [now - 30, now - 3, now - 2]
    for number, hour in enumerate((hours[0], hours[0], hours[1], hours[1], hours[2])):
        await click(services, "u", f"i-{number}", list_id("v", hour, number))
    await click(services, "u", "again", list_id("v", hours[0], 0))
    await click(services, "u", "other", list_id("w", hours[0], 9))
    in_this_hour = now * HOUR_US + HOUR_US // 2
    await execute(services, metadata.tables["events"].update().values(created_at=in_this_hour))
    attribution = ClickAttribution(services.database, services.events.event_weights)
    found = await attribution.clicked_by_hour("v", [*hours, now - 1])
    assert found == {hours[0]: 2, hours[1]: 2, hours[2]: 1}
    assert await attribution.clicked_by_hour("v", hours, within=1) == {}
    assert await attribution.clicked_by_hour("v", hours, within=2) == {hours[2]: 1}
    assert await attribution.clicked_by_hour("v", hours, within=40) == found
    assert await attribution.clicked_by_hour("v", []) == {}


async def test_metrics_count_lists_clicks_and_running_trials(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    active = versions[1]
    hour = hour_now() - 2
    await execute(
        served,
        metadata.tables["served"].insert().values(version=active, hour=hour, lists=20),
        metadata.tables["served"].insert().values(version=active, hour=hour - 30, lists=5),
    )
    await click(served, "user-1", "film-1", list_id(active, hour, 1))
    served.trials.impressions.add_lists(active, 3)
    await begin(client, versions[0])
    found = await scrape(client)
    assert found["ncr_lists_served_total", active] == 3
    assert found["ncr_lists_last_day", active] == 20
    assert found["ncr_clicked_lists_last_day", active] == 1
    assert found["ncr_trials_running", "interleaving"] == 1
    assert found["ncr_trials_running", "shadow"] == 0


async def scrape(client: httpx2.AsyncClient) -> dict[tuple[str, str], float]:
    """Samples by name and their one label."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@ON_POSTGRESQL
async def test_two_servers_count_lists_of_the_same_users(
    served: Services, versions: tuple[str, str]
) -> None:
    """In opposite orders: neither waits for the other for ever."""
    other = Database(served.settings.effective_database_url)
    row = ABTestRow("trial", "settings", *versions, 0.5, "running", now_us(), None, None, {}, 9)
    await ABTestRepository(served.database).insert(row)
    lists = {("trial", "a", user): 1 for user in range(3_000)}
    reverse = dict(reversed(lists.items()))

    async def add(repository: ABTestRepository, each: dict[tuple[str, str, int], int]) -> None:
        for _ in range(20):
            await repository.add_trial_lists(each)

    async with asyncio.timeout(60):
        await asyncio.gather(
            add(ABTestRepository(served.database), lists), add(ABTestRepository(other), reverse)
        )
    await other.close()
    rows = await served.database.fetch(sa.select(sa.func.sum(trial_lists.c.lists)))
    assert rows[0][0] == 2 * 20 * 3_000
