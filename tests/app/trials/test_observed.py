"""What is kept in memory until it is written, and click-through."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from app.core.attribution import hour_now, recommendation_id
from app.core.metadata import now_us
from app.core.settings import Settings
from app.schema import metadata
from app.services import Services, build_services
from app.trials.repository import TrialRepository
from tests.app.patience import until
from tests.app.trials.support import click, execute, list_id, rows, running
from tests.app.trials.test_trials import begin

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_hour")]

HOUR_US = 3_600_000_000


async def test_servers_add_up_what_they_gave_out(settings: Settings, services: Services) -> None:
    another = await build_services(settings)
    for each in (services, another):
        each.trials.served("v-1")
        each.trials.served("v-1", 4)
        each.trials.served("v-2")
    await asyncio.gather(services.trials.flush(), another.trials.flush())
    services.trials.served("v-1")
    assert (await services.trials.click_through("v-1"))["lists"] == 11
    assert (await another.trials.click_through("v-1"))["lists"] == 10  # not written yet
    await another.close()
    await services.trials.close()
    stored = {(row["version"], row["hour"]): row["lists"] for row in await rows(services, "served")}
    assert sum(n for (version, _), n in stored.items() if version == "v-1") == 11
    assert sum(n for (version, _), n in stored.items() if version == "v-2") == 2
    assert {hour for _, hour in stored} == {hour_now()}


async def test_what_is_observed_is_written_by_itself(
    settings: Settings, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.trials.service.WRITE_SECONDS", 0.01)
    await services.trials.start()
    services.trials.served("v", 3)

    async def there() -> bool:
        return bool(await rows(services, "served"))

    await until(there)
    assert (await services.trials.click_through("v"))["lists"] == 3


async def test_closing_writes_the_rest(settings: Settings, services: Services) -> None:
    another = await build_services(settings)
    await another.trials.start()
    another.trials.served("v", 7)
    await another.close()
    assert (await services.trials.click_through("v"))["lists"] == 7


async def test_nothing_is_lost_while_the_database_is_away(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = await begin(client, versions[0])
    trials = served.trials
    trials.served("v", 2)
    trials.observe_shadow(running(trials), [1], [1])
    names = [recommendation_id(begun["trial_id"]) for _ in range(3)]
    for name in names:
        trials.record(name, running(trials), None, [1], [2])

    async def away(*_: Any) -> None:
        raise OperationalError("INSERT", {}, OSError("away"))

    with monkeypatch.context() as patch:
        for method in ("add_impressions", "add_served", "add_sums"):
            patch.setattr(TrialRepository, method, away)
        for _ in range(2):
            with pytest.raises(OperationalError):
                await trials.observed.write_impressions()
            with pytest.raises(OperationalError):
                await trials.observed.write_counts()
        trials.served("v", 1)
    await trials.flush()
    assert [row["recommendation_id"] for row in await rows(served, "impressions")] == sorted(names)
    assert (await trials.click_through("v"))["lists"] == 3
    sums = {row["name"]: row["value"] for row in await rows(served, "trial_sums")}
    assert sums == {"requests": 1, "overlap": 1, "same_first": 1, "rbo": pytest.approx(1)}


async def test_too_many_impressions_are_dropped_and_counted(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.trials.observed.MOST_WAITING", 4)
    monkeypatch.setattr("app.trials.observed.GROUP_ROWS", 3)
    await begin(client, versions[0])
    trials = served.trials
    for n in range(6):
        trials.record(f"r-{n}", running(trials), None, [1], [2])
    await trials.flush()
    written = await rows(served, "impressions")
    assert [row["recommendation_id"] for row in written] == ["r-0", "r-1", "r-2", "r-3"]
    assert written[0]["teams"] == {"a": [1], "b": [2]}
    found = await scrape(client)
    assert found["ncr_interleaved_lists_total", "recorded"] == 4
    assert found["ncr_interleaved_lists_total", "dropped"] == 2
    trials.record("r-6", running(trials), None, [1], [2])
    await trials.flush()
    assert len(await rows(served, "impressions")) == 5


async def test_lists_of_trials_that_ended_long_ago_are_forgotten(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.trials.service.FORGET_ROWS", 2)
    trials, ended = served.trials, []
    for _ in range(2):
        begun = await begin(client, versions[0])
        for n in range(5):
            trials.record(f"{begun['trial_id']}.{n}", running(trials), None, [1], [2])
        ended.append(await trials.end(begun["trial_id"]))
    await trials.forget()
    assert len(await rows(served, "impressions")) == 10
    table = metadata.tables["trials"]
    a_month = now_us() - 31 * 86_400_000_000
    first = table.c.trial_id == ended[0].trial_id
    await execute(served, table.update().where(first).values(ended_at=a_month))
    await trials.forget()
    left = {row["trial_id"] for row in await rows(served, "impressions")}
    assert left == {ended[1].trial_id}
    assert (await trials.get(ended[0].trial_id)).report == ended[0].report


async def test_click_through_of_a_version(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    url = f"/admin/models/{active}"
    none = {"lists": 0, "clicked": 0, "rate": None}
    assert (await client.get(url)).json()["click_through"] == none
    served.trials.served(active, 8)
    served.trials.served(other, 2)
    first, second, theirs = (recommendation_id(version) for version in (active, active, other))
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
    attribution = services.trials.clicks._attribution
    found = await attribution.clicked_by_hour("v", [*hours, now - 1])
    assert found == {hours[0]: 2, hours[1]: 2, hours[2]: 1}
    assert await attribution.clicked_by_hour("v", hours, within=1) == {}
    assert await attribution.clicked_by_hour("v", hours, within=2) == {hours[2]: 1}
    assert await attribution.clicked_by_hour("v", hours, within=40) == found
    assert await attribution.clicked_by_hour("v", []) == {}


async def test_figures(
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
    served.trials.served(active, 3)
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
