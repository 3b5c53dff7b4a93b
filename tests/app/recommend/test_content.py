"""Attributes in the model: described items and users have a place before the first event.

In this world the category decides taste: each user takes up items of one colour, and tells it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.settings import Settings
from app.inference import new_items as module
from app.inference.new_items import NewItems
from app.main import create_app
from app.training import reader
from app.wiring import Services
from tests.app.conftest import client_of, run_job_here, until
from tests.app.recommend.conftest import ask, ids, serving, sources

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

COLOURS = ("red", "green", "blue", "grey")
USERS_EACH, ITEMS_EACH = 15, 12
PARAMS: dict[str, Any] = {"factors": 8, "epochs": 15, "force": True}


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


@pytest.fixture
async def world(app: FastAPI) -> Services:
    """Users and items of four colours, and a model of them."""
    services: Services = app.state.services
    n_items, n_users = ITEMS_EACH * len(COLOURS), USERS_EACH * len(COLOURS)
    await services.catalog.upsert_rows(
        [
            {"id": f"item-{n}", "categories": [colour_of(n)], "attributes": {"noise": n % 7}}
            for n in range(n_items)
        ]
    )
    events = [
        {"user": f"user-{u}", "item": f"item-{n}", "timestamp": u * 100 + n}
        for u in range(n_users)
        for n in range(n_items)
        if colour_of(u) == colour_of(n) and (u + n) % 5
    ]
    assert (await services.events.add_rows(events, 0)).accepted == len(events)
    await services.users.upsert_rows(
        [{"id": f"user-{u}", "attributes": {"team": colour_of(u)}} for u in range(n_users)]
    )
    await train(services, app)
    return services


async def train(services: Services, app: FastAPI, **params: Any) -> dict[str, Any]:
    job = await run_job_here(services, services.settings, **PARAMS | params)
    assert job.status == "succeeded", job.error
    await app.state.recommend.models.refresh()
    return job.metrics or {}


@pytest.fixture
def new_items(world: Services) -> NewItems:
    return NewItems(world.events, world.catalog, 5)


@pytest.fixture
async def other(settings: Settings, world: Services) -> AsyncIterator[FastAPI]:
    """A second server of the same service, or the same after a restart."""
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        yield app


async def place(app: FastAPI, new_items: NewItems) -> None:
    """As a server does by itself within seconds."""
    await app.state.recommend.models.add_new_items(new_items)


async def rank_of(client: httpx2.AsyncClient, user: str, item: str) -> int:
    """The place of an item in a list of everything."""
    return ids(await ask(client, user, n=100, exclude_seen=False)).index(item)


async def test_a_described_item_is_shown_to_those_it_suits_before_any_event(
    app: FastAPI, client: httpx2.AsyncClient, new_items: NewItems
) -> None:
    assert (await client.put("/items/new", json={"categories": ["red"]})).status_code == 201
    await client.put("/items/untold", json={"title": "Untold"})
    await place(app, new_items)
    red, green = "user-0", "user-1"
    assert await rank_of(client, red, "new") < ITEMS_EACH + 2
    assert await rank_of(client, green, "new") > ITEMS_EACH
    entry = next(i for i in (await ask(client, red, n=30))["items"] if i["id"] == "new")
    assert entry["source"] == "model"
    assert entry["score"] is not None
    assert "untold" not in serving(app).item_ids

    # Another description: another place. A change that says nothing changes no list.
    await client.put("/items/new", json={"categories": ["green"]})
    await place(app, new_items)
    assert await rank_of(client, red, "new") > ITEMS_EACH
    assert await rank_of(client, green, "new") < ITEMS_EACH + 2
    model = serving(app)
    await client.patch("/items/new", json={"title": "New"})
    await place(app, new_items)
    assert serving(app) is model


async def test_what_may_not_be_recommended_stays_out(
    app: FastAPI, client: httpx2.AsyncClient, new_items: NewItems
) -> None:
    red: dict[str, Any] = {"categories": ["red"]}
    await client.put("/items/hidden", json=red | {"hidden": True})
    await client.put("/items/later", json=red | {"available_from": 4e9})
    await client.put("/items/over", json=red | {"available_until": 1})
    await client.put("/items/gone", json=red)
    await place(app, new_items)
    assert {"later", "over", "gone"} <= set(serving(app).item_ids)
    assert "hidden" not in serving(app).item_ids
    await client.delete("/items/gone")
    for _ in range(2):  # by the model that has it, and by one without
        shown = ids(await ask(client, "user-0", n=100))
        assert not {"hidden", "later", "over", "gone"} & set(shown)
        await place(app, new_items)
    assert "gone" not in serving(app).item_ids
    await client.patch("/items/hidden", json={"hidden": False})
    await place(app, new_items)
    assert await rank_of(client, "user-0", "hidden") < ITEMS_EACH + 2


async def test_users_who_take_it_up_move_it(
    app: FastAPI, client: httpx2.AsyncClient, new_items: NewItems
) -> None:
    """It is said to be red, and green users take it up: one of them counts already."""
    await client.put("/items/new", json={"categories": ["red"]})
    await place(app, new_items)

    async def preferred() -> float:
        body = {"user": "user-57", "items": ["new", "item-0"]}
        answer = (await client.post("/compare", json=body)).json()
        return float(answer["probability"][0][1])

    chances = [await preferred()]
    for number in range(3):
        takers = [{"user": f"user-{1 + 4 * u}", "item": "new"} for u in range(1 + 3 * number)]
        await client.post("/events", json=takers)
        await place(app, new_items)
        chances.append(await preferred())
    assert chances[1] > chances[0]
    assert chances[3] > chances[0]
    assert "new" in serving(app).item_ids


async def test_only_the_newest_of_very_many_are_placed(
    app: FastAPI, client: httpx2.AsyncClient, new_items: NewItems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PLACED", 5)
    monkeypatch.setattr(module, "PLACED_AT_ONCE", 2)
    rows = [{"id": f"new-{n}", "categories": ["red"]} for n in range(8)]
    await client.post("/items", json=rows)
    await place(app, new_items)
    own = set(serving(app).item_ids)
    assert {f"new-{n}" for n in range(3, 8)} == {item for item in own if item.startswith("new-")}


async def test_a_described_user_gets_a_list_for_people_like_them(
    app: FastAPI, client: httpx2.AsyncClient, world: Services
) -> None:
    """Before the first event; changed attributes change it, and events count beside them."""
    stranger = await ask(client, "stranger", n=8)
    assert set(sources(stranger)) == {"popular"}

    async def colours(user: str) -> set[str]:
        answer = await ask(client, user, n=8)
        assert set(sources(answer)) == {"fold_in"}
        return {colour_of(int(item.removeprefix("item-"))) for item in ids(answer)}

    await client.put("/users/anna", json={"attributes": {"team": "red"}})
    assert await colours("anna") == {"red"}
    await client.patch("/users/anna", json={"attributes": {"team": "blue"}})
    assert await colours("anna") == {"blue"}

    async def green_over_blue() -> float:
        body = {"user": "anna", "items": ["item-17", "item-2"]}
        return float((await client.post("/compare", json=body)).json()["probability"][0][1])

    before = await green_over_blue()
    green = [{"user": "anna", "item": f"item-{n}"} for n in (1, 5, 9, 13)]
    await client.post("/events", json=green)
    assert await green_over_blue() > before
    # Nothing that is known of a user: as a stranger.
    await client.put("/users/anton", json={"attributes": {"shoe": 44}})
    assert (await ask(client, "anton", n=8))["items"]


async def test_attributes_of_a_trained_user_change_no_list(
    client: httpx2.AsyncClient, world: Services
) -> None:
    before = await ask(client, "user-0")
    await client.put("/users/user-0", json={"attributes": {"team": "blue"}})
    after = await ask(client, "user-0")
    assert after["items"] == before["items"]


async def test_attributes_of_a_trained_user_without_a_stored_vector_change_no_list(
    app: FastAPI, client: httpx2.AsyncClient, world: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_REMEMBERED", 40)
    await train(world, app, users="history")
    model = serving(app)
    assert model.places_users
    assert not model.names_all_users
    users = [f"user-{n}" for n in range(USERS_EACH * len(COLOURS))]
    others = [user for user in users if user not in model.user_rows]
    assert len(others) == len(users) - 40
    for user in others[:3]:
        before = await ask(client, user)
        assert set(sources(before)) == {"fold_in"}
        colour = colour_of(int(user.removeprefix("user-")) + 1)
        await client.put(f"/users/{user}", json={"attributes": {"team": colour}})
        assert (await ask(client, user))["items"] == before["items"]
    # A stranger gets the list of the attributes.
    await client.put("/users/anna", json={"attributes": {"team": "red"}})
    answer = await ask(client, "anna", n=8)
    assert {colour_of(int(item.removeprefix("item-"))) for item in ids(answer)} == {"red"}


async def test_other_servers_and_a_restart_give_the_same_lists(
    app: FastAPI, client: httpx2.AsyncClient, other: FastAPI, world: Services
) -> None:
    """By themselves, within seconds of the change."""
    rows = [{"id": f"new-{n}", "categories": [colour_of(n)]} for n in range(6)]
    await client.post("/items", json=rows)
    await client.put("/users/anna", json={"attributes": {"team": "red"}})

    def is_there(server: FastAPI) -> bool:
        return "new-5" in serving(server).item_ids

    await until(lambda: is_there(app) and is_there(other), 30)
    assert serving(app).key == serving(other).key
    async with client_of(other) as second:
        for user in ("user-0", "user-1", "anna"):
            lists = [(await ask(each, user, n=20))["items"] for each in (client, second)]
            assert lists[0] == lists[1]
        await second.put("/users/anna", json={"attributes": {"team": "green"}})
        changed = await ask(second, "anna", n=20)

        async def followed() -> bool:
            return (await ask(client, "anna", n=20))["items"] == changed["items"]

        await until(followed)


async def test_without_attributes_nothing_of_it_happens(
    app: FastAPI, client: httpx2.AsyncClient, world: Services, new_items: NewItems
) -> None:
    """By a request that leaves them out, as for a checkpoint of a version before."""
    metrics = await train(world, app, attributes=[])
    assert "content" not in metrics
    assert not serving(app).trained.checkpoint.content
    await client.put("/items/new", json={"categories": ["red"]})
    await client.put("/users/anna", json={"attributes": {"team": "red"}})
    await place(app, new_items)
    assert "new" not in serving(app).item_ids
    assert set(sources(await ask(client, "anna"))) == {"popular"}

    metrics = await train(world, app, attributes=["categories"])
    assert list(metrics["content"]) == ["items"]
    assert list(metrics["content"]["items"]["attributes"]) == ["categories"]
    await place(app, new_items)
    assert "new" in serving(app).item_ids
    assert set(sources(await ask(client, "anna"))) == {"popular"}


async def test_an_embedding_tells_where_an_item_belongs(
    app: FastAPI, client: httpx2.AsyncClient, world: Services, new_items: NewItems
) -> None:
    n_items = ITEMS_EACH * len(COLOURS)

    def vector(n: int) -> list[float]:
        return [float(colour_of(n) == colour) + 0.01 * (n % 3) for colour in COLOURS]

    rows = [{"id": f"item-{n}", "embedding": vector(n)} for n in range(n_items)]
    assert (await client.post("/items", json=rows)).json()["accepted"] == n_items
    metrics = await train(world, app)
    assert list(metrics["content"]["items"]["attributes"]) == ["embedding"]
    await client.put("/items/new", json={"embedding": vector(0)})
    await place(app, new_items)
    assert await rank_of(client, "user-0", "new") < ITEMS_EACH + 2
    assert await rank_of(client, "user-1", "new") > ITEMS_EACH
