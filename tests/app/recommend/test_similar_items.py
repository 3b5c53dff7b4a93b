"""Items like an item: by the model, and by who took them up where it does not know the item."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.inference.new_items import NewItems
from app.wiring import Services
from tests.app.conftest import SMALL, publish_model
from tests.app.recommend.conftest import ITEMS, USERS, ids, serving

pytestmark = pytest.mark.anyio


async def similar(client: httpx2.AsyncClient, item: str, **params: Any) -> dict[str, Any]:
    response = await client.get(f"/items/{item}/similar", params=params)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_by_the_model(app: FastAPI, client: httpx2.AsyncClient, trained: str) -> None:
    model = serving(app)
    space, row = model.engine.item_space.vectors, model.item_ids.index(ITEMS[0])
    cosines = {
        item: float(space[row] @ space[other])
        for other, item in enumerate(model.item_ids)
        if other != row
    }
    answer = await similar(client, ITEMS[0], n=1000)
    assert (answer["item"], answer["model_version"]) == (ITEMS[0], trained)
    assert ids(answer) == sorted(cosines, key=lambda item: -cosines[item])
    titles = {item.id: item.title for item in SMALL.items}
    for found in answer["items"]:
        assert found["score"] == pytest.approx(cosines[found["id"]], abs=2e-6)
        assert -1 <= found["score"] <= 1
        assert found["title"] == titles[found["id"]]
    assert ids(await similar(client, ITEMS[0])) == ids(answer)[:10]


async def test_hidden_and_deleted_items_are_left_out_at_once(
    client: httpx2.AsyncClient, trained: str
) -> None:
    first, second, third, *_ = ids(await similar(client, ITEMS[0]))
    await client.patch(f"/items/{first}", json={"hidden": True})
    await client.delete(f"/items/{second}")
    assert ids(await similar(client, ITEMS[0]))[0] == third
    assert ids(await similar(client, first))  # what is hidden may be asked about
    await client.patch(f"/items/{first}", json={"hidden": False})
    assert ids(await similar(client, ITEMS[0]))[0] == first
    for item in (second, "no such"):
        response = await client.get(f"/items/{item}/similar")
        assert (response.status_code, response.json()["code"]) == (404, "unknown_item")


async def test_without_a_model_by_who_took_them_up(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    users: dict[str, set[str]] = {item: set() for item in ITEMS}
    for user, item, _ in SMALL.interactions:
        users[item].add(user)
    own = users[ITEMS[3]]
    cosines = {
        item: len(own & others) / math.sqrt(len(own) * len(others))
        for item, others in users.items()
        if item != ITEMS[3] and own & others
    }
    answer = await similar(client, ITEMS[3], n=1000)
    assert answer["model_version"] is None
    assert [found["score"] for found in answer["items"]] == pytest.approx(
        sorted(cosines.values(), reverse=True), abs=2e-6
    )
    for found in answer["items"]:
        assert found["score"] == pytest.approx(cosines[found["id"]], abs=2e-6)


@pytest.mark.slow
async def test_items_that_the_model_does_not_know(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    rows = [{"user": f"user-{n}", "item": "late"} for n in (1, 2, 3)]
    rows += [{"user": "user-1", "item": "later"}, {"user": "stranger", "item": "elsewhere"}]
    rows += [{"user": "user-2", "item": "refused", "type": "dislike"}]
    await client.post("/events", json=rows)
    answer = await similar(client, "late", n=1000)
    assert answer["model_version"] is None
    assert "later" in ids(answer)
    assert not {"late", "elsewhere", "refused"} & set(ids(answer))
    await client.put("/items/untouched", json={})
    assert ids(await similar(client, "untouched")) == []
    # A model that knows it answers by itself again.
    version = await publish_model(filled, seed=1)
    await app.state.recommend.models.refresh()
    assert (await similar(client, "late"))["model_version"] == version
    assert (await similar(client, "untouched"))["model_version"] is None


@pytest.mark.parametrize("query", ["n=0", "n=1001", "n=x"])
async def test_bad_input(client: httpx2.AsyncClient, filled: Services, query: str) -> None:
    assert (await client.get(f"/items/{ITEMS[0]}/similar?{query}")).status_code == 422


async def test_more_lists_at_a_time_than_can_be_made_are_refused(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    """Those who ask for the same one take one place, and what is kept takes none."""
    places = app.state.recommend.similar._slots
    places.limit = 1
    asked = [client.get(f"/items/{ITEMS[0]}/similar") for _ in range(8)]
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    with places.one():
        refused = await client.get(f"/items/{ITEMS[1]}/similar")
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert (await client.get(f"/items/{ITEMS[0]}/similar")).status_code == 200
    assert (await client.get(f"/items/{ITEMS[1]}/similar")).status_code == 200


async def test_a_new_item_is_found_once_it_is_fitted(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    """Also where the list was asked for just before."""
    await client.post("/events", json=[{"user": user, "item": "late"} for user in USERS[:5]])
    before = await similar(client, ITEMS[0], n=1000)
    assert "late" not in ids(before)
    await app.state.recommend.models.add_new_items(NewItems(filled.events, filled.catalog, 5))
    after = await similar(client, ITEMS[0], n=1000)
    assert set(ids(after)) == {*ids(before), "late"}
    assert after["model_version"] == before["model_version"] == trained


async def test_filters_leave_the_order(
    client: httpx2.AsyncClient, trained: str, app: FastAPI
) -> None:
    """By the model, and by who took both up: here of an item that no model knows."""
    rows = [{"user": f"user-{n}", "item": "late"} for n in range(1, 6)]
    await client.post("/events", json=rows)
    genres = {item.id: item.genre for item in SMALL.items}
    for item in (ITEMS[0], "late"):
        whole = ids(await similar(client, item, n=1000))
        genre = genres[whole[0]]
        answer = await similar(client, item, category=genre, n=3)
        assert ids(answer) == [other for other in whole if genres.get(other) == genre][:3]
        answer = await similar(client, item, exclude=[whole[0], whole[2], "no such"], n=5)
        assert ids(answer) == [whole[1], *whole[3:7]]
        await client.post("/events", json={"user": "visitor", "item": whole[1]})
        await client.post("/events", json={"user": "visitor", "item": whole[2], "type": "dislike"})
        answer = await similar(client, item, user="visitor", n=4)
        gone = {event["item"] for event in await history(client, "visitor")}
        assert ids(answer) == [other for other in whole if other not in gone][:4]
        assert ids(await similar(client, item, user="stranger")) == whole[:10]
    ids_given = {(await similar(client, ITEMS[0]))["recommendation_id"] for _ in range(3)}
    assert len(ids_given) == 3
    assert all(given.startswith(f"{trained}.") for given in ids_given)


async def history(client: httpx2.AsyncClient, user: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = (await client.get(f"/users/{user}/events")).json()["items"]
    return events


@pytest.mark.slow
async def test_pages_follow_while_another_model_comes(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    whole = ids(await similar(client, ITEMS[0], n=1000, user="user-1"))
    answer = await similar(client, ITEMS[0], n=4, user="user-1")
    shown = ids(answer)
    while (cursor := answer["next_cursor"]) is not None:
        answer = await similar(client, ITEMS[0], n=4, user="user-1", cursor=cursor)
        shown += ids(answer)
        if len(shown) == 8:
            await publish_model(filled, seed=4)
            await app.state.recommend.models.refresh()
            await client.post("/events", json={"user": "user-1", "item": whole[9]})
    assert shown == [item for item in whole if item != whole[9]]
    first = (await similar(client, ITEMS[0], n=4, user="user-1"))["next_cursor"]
    for path, params in (
        (ITEMS[1], {"user": "user-1"}),
        (ITEMS[0], {"user": "user-2"}),
        (ITEMS[0], {}),
        (ITEMS[0], {"user": "user-1", "exclude": ITEMS[3]}),
    ):
        response = await client.get(f"/items/{path}/similar", params={"cursor": first, **params})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor")
    response = await client.get("/recommend/user-1", params={"cursor": first})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor")


@pytest.mark.slow
@pytest.mark.parametrize("query", ["user=", "user=%00", "exclude=%00", "cursor=x", "category=a%00"])
async def test_bad_filters(client: httpx2.AsyncClient, filled: Services, query: str) -> None:
    response = await client.get(f"/items/{ITEMS[0]}/similar?{query}")
    assert response.status_code == (200 if query.startswith("category") else 422)
