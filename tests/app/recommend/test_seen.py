"""Items that come back after their age, and items that were shown and not taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.ab_tests.schemas import ABTestParams, parse_trial
from app.core.settings import Settings
from app.core.tables import now_us
from app.events import shown_lists as shown_module
from app.events.schemas import NewEvent
from app.events.seen_rule import parse_rule
from app.events.tables import shown_lists
from app.jobs.schemas import TrainParams
from app.main import create_app
from app.recommend.schemas import RecommendationQuery
from app.transfer.backup import write_backup
from app.transfer.export import export
from app.wiring import Services
from tests.app.conftest import (
    QUICK,
    add_small_data,
    client_of,
    publish_model,
    thread_worker,
    until,
)
from tests.app.recommend.conftest import ITEMS, USERS, ask, ids, post, refused, seen_by
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
BOUGHT = json.dumps({"purchase": "14d"})
Advance = Callable[[int], None]


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Sets how much later than now requests come, in microseconds."""
    later = 0

    def now() -> int:
        return now_us() + later

    def set_later(value: int) -> None:
        nonlocal later
        later = value

    for module in (
        "app.recommend.service",
        "app.recommend.similar_items",
        "app.events.shown_lists",
    ):
        monkeypatch.setattr(f"{module}.now_us", now)
    return set_later


async def buy(client: httpx2.AsyncClient, user: str, item: str, days: float, **more: Any) -> None:
    at = (now_us() - int(days * DAY_US)) / 1e6
    event = {"user": user, "item": item, "type": "purchase", "timestamp": at, **more}
    response = await client.post("/events", json=event)
    assert response.json()["accepted"] == 1, response.text


async def rows(services: Services) -> list[Any]:
    return list(await services.database.fetch(sa.select(shown_lists)))


async def test_groceries_come_back_on_every_route(client: httpx2.AsyncClient, trained: str) -> None:
    for item, days in ((ITEMS[0], 15.0), (ITEMS[1], 13.0)):
        await buy(client, "shopper", item, days)
    await buy(client, "shopper", ITEMS[2], 40, type="view")

    async def similar(**params: Any) -> list[str]:
        path = f"/items/{ITEMS[5]}/similar"
        response = await client.get(path, params={"user": "shopper", "n": 60, **params})
        return [item["id"] for item in response.json()["items"]]

    async def basket(**params: Any) -> list[str]:
        if "seen" in params:
            params["seen"] = json.loads(params["seen"])
        body = {"user": "shopper", "items": [ITEMS[7]], "n": 60, **params}
        return ids(await post(client, "/recommend", **body))

    async def batch(**params: Any) -> list[str]:
        if "seen" in params:
            params["seen"] = json.loads(params["seen"])
        answer = await post(client, "/recommend/batch", users=["shopper"], n=60, **params)
        return ids(answer["results"][0])

    async def plain(**params: Any) -> list[str]:
        return ids(await ask(client, "shopper", n=60, **params))

    async def paged(**params: Any) -> list[str]:
        answer = await ask(client, "shopper", n=7, **params)
        found = ids(answer)
        while answer["next_cursor"] is not None:
            answer = await ask(client, "shopper", n=7, cursor=answer["next_cursor"], **params)
            found += ids(answer)
        assert len(found) == len({*found})
        return found

    for route in (plain, basket, batch, paged, similar):
        for _ in range(2):  # from the caches, too
            assert not {*ITEMS[:3]} & {*await route()}, route
            found = {*await route(seen=BOUGHT)}
            assert {*ITEMS[:3]} & found == {ITEMS[0]}, route
            found = {*await route(seen='{"purchase":"30d","view":0}')}
            assert {*ITEMS[:3]} & found == {ITEMS[2]}, route
            assert {*ITEMS[:3]} <= {*await route(seen='{"*":"0s"}')}, route
        if route is basket:
            assert ITEMS[7] not in await route(seen='{"*":"0s"}')
    # A rule says nothing where all that was seen may be there.
    answer = await ask(client, "shopper", n=60, exclude_seen="false", seen='{"*":"forever"}')
    assert {*ITEMS[:3]} <= {*ids(answer)}


@pytest.mark.parametrize("known", [True, False])
async def test_a_cached_list_ends_when_an_item_comes_back(
    client: httpx2.AsyncClient, app: FastAPI, trained: str, advance: Advance, known: bool
) -> None:
    """By the setting, for a user of the model and for a new one."""
    events = app.state.services.events
    events.seen_rule = parse_rule({"*": "14d"})
    user = USERS[0] if known else "new"
    await buy(client, user, ITEMS[3], 13.5)
    await buy(client, user, ITEMS[4], 13.9)
    assert not {ITEMS[3], ITEMS[4]} & {*ids(await ask(client, user, n=60))}
    cache = app.state.recommend.lists.cache
    turns: list[tuple[float, set[str]]] = [
        (0.05, set()),
        (0.2, {ITEMS[4]}),
        (0.6, {ITEMS[3], ITEMS[4]}),
    ]
    for later, back in turns:
        advance(int(later * DAY_US))
        hits = 0
        for _ in range(2):
            hits = cache.hits
            assert {ITEMS[3], ITEMS[4]} & {*ids(await ask(client, user, n=60))} == back
        assert cache.hits > hits  # the second time it is the same list
    await buy(client, user, ITEMS[4], 0)
    assert {ITEMS[3], ITEMS[4]} & {*ids(await ask(client, user, n=60))} == {ITEMS[3]}


async def test_dislikes_come_back_only_by_name(
    client: httpx2.AsyncClient, app: FastAPI, trained: str
) -> None:
    await buy(client, "u", ITEMS[0], 50)
    await buy(client, "u", ITEMS[1], 50, type="dislike", event_id="d")
    await client.post("/preferences", json={"user": "u", "winner": ITEMS[2], "loser": ITEMS[3]})

    async def back(**rule: str) -> set[str]:
        return {*ITEMS[:4]} & {*ids(await ask(client, "u", n=60, seen=json.dumps(rule)))}

    preferred = {ITEMS[2], ITEMS[3]}  # a preference is no event
    assert await back(**{"*": "1d"}) == preferred | {ITEMS[0]}
    assert await back(dislike="40d") == preferred | {ITEMS[1]}
    assert await back(**{"*": "1d", "dislike": "60d"}) == preferred | {ITEMS[0]}
    found = await ask(client, "u", n=60, exclude_seen="false", seen='{"dislike":"1d"}')
    assert ITEMS[1] not in ids(found)
    assert (await client.delete("/events/d")).status_code == 204
    assert await back() == preferred | {ITEMS[1]}


async def test_lists_ranked_ahead_are_served_without_rules_alone(settings: Settings) -> None:
    settings = settings.model_copy(update={"precompute_users": 100})
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        services: Services = app.state.services
        await add_small_data(services)
        await services.jobs.submit_training(TrainParams.model_validate(QUICK))
        worker = thread_worker(services, settings)
        while await worker.run_once():
            pass
        await app.state.recommend.models.refresh()
        model = app.state.recommend.models.current
        assert USERS[0] in model.listed
        for params in ({"seen": '{"*":"1d"}'}, {"seen": '{"*":"1d"}', "hide_shown": "6h"}):
            found = ids(await ask(client, USERS[0], n=10, **params))
            whole = ids(await ask(client, USERS[0], n=60, **params | {"hide_shown": "0"}))
            assert found == whole[:10]
            assert {*seen_by(USERS[0])} & {*whole}  # of 1970: all are back
        assert not {*ids(await ask(client, USERS[0], n=10, hide_shown="6h"))} & {*found}
        services.events.seen_rule = parse_rule({"*": "1d"})
        assert {*seen_by(USERS[0])} & {*ids(await ask(client, USERS[0], n=60))}
        assert ids(await ask(client, USERS[0])) == whole[:10]


@pytest.mark.parametrize("user", [USERS[0], "a visitor"])
async def test_what_was_shown_is_hidden_for_some_hours(
    client: httpx2.AsyncClient, app: FastAPI, trained: str, advance: Advance, user: str
) -> None:
    async def asked(**params: Any) -> list[str]:
        return ids(await ask(client, user, n=5, hide_shown="6h", **params))

    services: Services = app.state.services
    first, second = await asked(), await asked()
    assert len({*first, *second}) == 10
    whole = ids(await ask(client, user, n=60, hide_shown=0))
    assert {*first} <= {*whole}
    await services.events.shown.write()  # the same from the database
    assert not {*first, *second} & {*await asked()}
    advance(5 * HOUR_US)
    later = await asked()
    assert not {*first, *second} & {*later}
    advance(7 * HOUR_US)
    again = await asked()
    assert {*first} & {*again}
    assert not {*later} & {*again}
    # A click makes it taken: it follows the rule of what is seen, and nothing else.
    await buy(client, user, again[0], 0, type="click")
    found = ids(await ask(client, user, n=60, hide_shown="6h"))
    assert not {*again} & {*found}
    await services.events.shown.write()
    assert len(await rows(services)) >= 4


async def test_taken_items_follow_the_rule(client: httpx2.AsyncClient, trained: str) -> None:
    shown = ids(await ask(client, "u", n=3, hide_shown=3600))
    await buy(client, "u", shown[1], 0, type="click")
    found = ids(await ask(client, "u", n=60, hide_shown=3600))
    assert not {*shown} & {*found}
    # Everything was shown to this user by now: the rule is asked for by another.
    shown = ids(await ask(client, "v", n=3, hide_shown=3600))
    await buy(client, "v", shown[1], 0, type="click")
    found = ids(await ask(client, "v", n=60, hide_shown=3600, seen='{"click":"0s"}'))
    assert {*shown} & {*found} == {shown[1]}
    assert not {*shown} & {*ids(await ask(client, "v", n=60, hide_shown=3600))}


async def test_every_route_remembers_and_hides(
    client: httpx2.AsyncClient, trained: str, app: FastAPI
) -> None:
    async def get() -> list[str]:
        return ids(await ask(client, "u", n=3, hide_shown="1h"))

    async def basket() -> list[str]:
        return ids(
            await post(client, "/recommend", user="u", items=[ITEMS[0]], n=3, hide_shown="1h")
        )

    async def batch() -> list[str]:
        answer = await post(client, "/recommend/batch", users=["u"], n=3, hide_shown=3600)
        return ids(answer["results"][0])

    async def similar() -> list[str]:
        params = {"user": "u", "n": 3, "hide_shown": "1h"}
        return ids((await client.get(f"/items/{ITEMS[0]}/similar", params=params)).json())

    async def pages() -> list[str]:
        params = {"n": 2, "hide_shown": "1h"}
        first = await ask(client, "u", **params)
        second = await ask(client, "u", cursor=first["next_cursor"], **params)
        assert [item["rank"] for item in second["items"]] == [3, 4]
        return ids(first) + ids(second)

    found: list[str] = []
    for route in (get, basket, batch, similar, pages, get):
        more = await route()
        assert len(more) >= 3
        assert not {*found} & {*more}, route
        found += more
    # What nobody was shown is not remembered.
    before = len(await app.state.services.events.shown.of("u"))
    await app.state.recommend.service.preview("u", RecommendationQuery(5, hide_shown=HOUR_US))
    await post(client, "/rerank", user="u", items=ITEMS[:5])
    await client.get("/users/u/questions")
    await post(client, "/recommend", items=[ITEMS[0]], n=3, hide_shown="1h")  # nobody's
    assert len(await app.state.services.events.shown.of("u")) == before
    reranked = await post(client, "/rerank", user="u", items=found[:5])
    assert len(reranked["items"]) == 5


async def test_trials_and_shadows_hide_the_same(
    client: httpx2.AsyncClient, app: FastAPI, filled: Services
) -> None:
    other = await publish_model(filled, epochs=3, seed=7)
    await publish_model(filled, epochs=5)
    await app.state.recommend.models.refresh()
    for kind in ("interleaving", "shadow"):
        await filled.trials.begin(ABTestParams(version=other, kind=kind, share=1.0))
    models = app.state.recommend.models

    async def is_loaded() -> bool:
        await ask(client, USERS[1])
        return models.at_hand(other) is not None

    await until(is_loaded)
    found: list[str] = []
    for _ in range(4):
        answer = await ask(client, USERS[1], n=5, hide_shown="6h")
        assert answer["recommendation_id"].startswith("trial-")
        assert not {*found} & {*ids(answer)}
        found += ids(answer)
    answer = await ask(client, USERS[1], n=60, seen='{"*":"1d"}')
    assert {*seen_by(USERS[1])} <= {*ids(answer)}


async def test_an_arm_that_shows_seen_items_gives_none_of_them_to_other_requests(
    client: httpx2.AsyncClient, app: FastAPI, trained: str
) -> None:
    services: Services = app.state.services
    user, rule = USERS[0], BOUGHT
    await buy(client, user, ITEMS[0], 20)
    seen = {*seen_by(user)} - {ITEMS[0]}
    body = {"kind": "settings", "share": 1.0, "settings": {"exclude_seen": False}}
    trial = await services.trials.begin(parse_trial(body))
    answer = await ask(client, user, n=40, seen=rule)
    assert answer["recommendation_id"].startswith(f"{trial.trial_id}-b.")
    await services.trials.end(trial.trial_id)
    assert not seen & {*ids(await ask(client, user, n=10, seen=rule))}
    assert ids(answer) == ids(await ask(client, user, n=40, exclude_seen="false"))


async def test_nothing_is_read_or_written_without_rules(
    client: httpx2.AsyncClient, app: FastAPI, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services

    async def fail(*arguments: Any) -> Any:
        raise AssertionError("it was asked for")

    monkeypatch.setattr(services.events.shown, "of", fail)
    monkeypatch.setattr(services.events.seen_histories, "get", fail)
    for user in (USERS[0], "new"):
        answer = await ask(client, user, n=3)
        await ask(client, user, n=3, cursor=answer["next_cursor"])
        await post(client, "/recommend", user=user, items=[ITEMS[0]])
        await post(client, "/recommend/batch", users=[user])
        await client.get(f"/items/{ITEMS[0]}/similar", params={"user": user})
        await ask(client, user, seen='{"*":"forever"}', hide_shown=0)
        await ask(client, user, exclude_seen="false", seen='{"*":"1d"}')
    assert services.events.shown._waiting == {}
    assert services.events.shown._task is None
    assert await rows(services) == []


async def test_bad_parameters_are_one_problem(client: httpx2.AsyncClient) -> None:
    many = json.dumps({f"t{n}": "1d" for n in range(40)})
    for name, text in (
        *(("seen", text) for text in ("", "x", "[]", '{"a":"-1d"}', '{"a":1e99}', many)),
        *(("hide_shown", text) for text in ("", "-1", "6 h", "31d", "1w", "1e3")),
    ):
        for path in ("/recommend/u", f"/items/{ITEMS[0]}/similar"):
            response = await client.get(path, params={name: text})
            assert (response.status_code, response.json()["code"]) == (422, f"invalid_{name}")
            assert response.headers["content-type"] == "application/problem+json"
    for body in ({"seen": []}, {"seen": {"a": True}}):
        assert await refused(client, "/recommend", user="u", **body) == (422, "invalid_seen")
    for value in (-1, 2.5, True, [], "x"):
        body = {"users": ["u"], "hide_shown": value}
        assert await refused(client, "/recommend/batch", **body) == (422, "invalid_hide_shown")


async def test_what_is_stored_of_a_user_is_bounded_and_forgotten(
    client: httpx2.AsyncClient, app: FastAPI, trained: str, advance: Advance
) -> None:
    services: Services = app.state.services
    shown = services.events.shown
    for number in range(shown_module.MAX_LISTS + 30):
        shown.add("many", None, 1, [number])
    for number in range(4):
        shown.add("long", None, 1, list(range(400 * number, 400 * number + 400)))
    await shown.write()
    stored: dict[str, list[Any]] = {}
    for row in sorted(await rows(services), key=lambda row: row.shown_at):
        stored.setdefault(row.external_id, []).append(row.item_ids)
    assert stored["many"] == [[n] for n in range(30, shown_module.MAX_LISTS + 30)]
    assert [items[0] for items in stored["long"]] == [400, 800, 1200]
    # A visitor, of whom nothing else is stored, is erased like anybody else.
    assert (await client.delete("/users/many")).status_code == 204
    assert (await client.delete("/users/many")).status_code == 404
    assert {row.external_id for row in await rows(services)} == {"long"}
    advance(31 * DAY_US)
    await services.events.delete_old_shown_lists()
    assert await rows(services) == []


async def test_erasing_and_merging_users(
    client: httpx2.AsyncClient, app: FastAPI, trained: str
) -> None:
    services: Services = app.state.services
    for user in ("visitor", "customer", "gone"):
        await buy(client, user, ITEMS[0], 1)
    one = ids(await ask(client, "visitor", n=4, hide_shown="1d"))
    two = ids(await ask(client, "customer", n=4, hide_shown="1d"))
    await ask(client, "gone", n=4, hide_shown="1d")
    await services.events.shown.write()
    response = await client.post("/users/visitor/merge", json={"into": "customer"})
    assert response.status_code == 200, response.text
    found = ids(await ask(client, "customer", n=60, hide_shown="1d"))
    assert not {*one, *two} & {*found}
    # A list that another server writes after the user was erased is dropped.
    late = (await services.events.profiles.get("gone")).user_id
    assert (await client.delete("/users/gone")).status_code == 204
    services.events.shown.add("gone", late, 1, [1, 2])
    await services.events.shown.write()
    assert {row.external_id for row in await rows(services)} == {"customer"}


@ON_SQLITE
async def test_a_history_of_100_000_events_is_read_once(
    client: httpx2.AsyncClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    for start in range(0, 100_000, 50_000):
        await services.events.import_rows(
            [
                NewEvent(f"e{n}", "long", f"i{n % 40_000}", "purchase", None, 1_000_000 + n)
                for n in range(start, start + 50_000)
            ]
        )
    histories = services.events.seen_histories
    reads = 0
    read = histories._rows

    async def counted(user_id: int, after: int) -> Any:
        nonlocal reads
        reads += after == 0
        return await read(user_id, after)

    monkeypatch.setattr(histories, "_rows", counted)
    for number in range(4):
        answer = await ask(client, "long", n=10, seen='{"purchase":"1d"}')
        assert len(answer["items"]) == 10
        await buy(client, "long", answer["items"][0]["id"], 0)
        if number:
            continue
        taken = answer["items"][0]["id"]
        assert taken not in ids(await ask(client, "long", n=10, seen='{"purchase":"1d"}'))
    assert reads == 1


@pytest.fixture
def server_settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"hide_shown": "6h", "seen": '{"purchase": "14d"}'})


@ON_POSTGRESQL
async def test_two_servers_hide_what_the_other_showed(
    servers: tuple[list[FastAPI], list[httpx2.AsyncClient]],
) -> None:
    """By the settings, over real HTTP: shown, clicked, bought long ago, and next pages."""
    apps, clients = servers
    services: Services = apps[0].state.services
    await add_small_data(services)
    await publish_model(services, epochs=3)
    for app in apps:
        await app.state.recommend.models.refresh()
    for user in (USERS[2], "visitor"):
        found: list[str] = []
        for turn in range(4):
            more = ids(await ask(clients[turn % 2], user, n=4))
            assert len(more) == 4
            assert not {*found} & {*more}
            found += more
            await _written(apps[turn % 2])
    await buy(clients[0], "shopper", ITEMS[0], 15)
    await buy(clients[0], "shopper", ITEMS[1], 13)
    await asyncio.sleep(0.15)
    answer = await ask(clients[1], "shopper", n=60)
    assert {ITEMS[0], ITEMS[1]} & {*ids(answer)} == {ITEMS[0]}
    first = await ask(clients[0], "reader", n=5)
    await _written(apps[0])
    second = await ask(clients[1], "reader", n=5, cursor=first["next_cursor"])
    assert len({*ids(first), *ids(second)}) == 10
    await _written(apps[1])
    await buy(clients[1], "reader", ids(first)[0], 0, type="click")
    await asyncio.sleep(0.15)
    rest = ids(await ask(clients[0], "reader", n=60, hide_shown="6h", seen='{"click":"0s"}'))
    assert {*ids(first), *ids(second)} & {*rest} == {ids(first)[0]}


async def _written(app: FastAPI) -> None:
    """Until the lists that a server has shown are where the others see them."""
    shown = app.state.services.events.shown
    await until(lambda: not shown._waiting)


async def test_a_backup_and_a_users_export_have_the_shown_lists(
    client: httpx2.AsyncClient, filled: Services, tmp_path: Path
) -> None:
    await ask(client, "visitor", n=4, hide_shown="1d")
    await filled.events.shown.write()
    report = await write_backup(filled, tmp_path / "backup.ncr")
    assert report.rows["shown_lists"] == 1
    shown = ids(await ask(client, USERS[0], n=4, hide_shown="1d"))
    exported = await export(filled, tmp_path / "out", user=USERS[0])
    lines = (tmp_path / "out" / "shown.csv").read_text().splitlines()
    assert exported.shown == 4
    assert [line.split(",")[:2] for line in lines[1:]] == [[USERS[0], item] for item in shown]


async def test_a_server_whose_clock_is_ahead(
    client: httpx2.AsyncClient, app: FastAPI, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.events.shown_lists.now_us", lambda: now_us() + 2_000_000)
    first = ids(await ask(client, "u", n=5, hide_shown="6h"))
    assert not {*first} & {*ids(await ask(client, "u", n=5, hide_shown="6h"))}
