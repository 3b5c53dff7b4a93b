"""`POST /recommend`: lists by a basket, a session or an item, with and without a user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.core.access import Role
from app.core.tables import metadata
from app.wiring import Services
from tests.app.conftest import client_of, publish_model
from tests.app.recommend.conftest import (
    ITEMS,
    USERS,
    ask,
    ids,
    post,
    refused,
    seen_by,
    serving,
    sources,
)
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio


async def contents(services: Services) -> dict[str, list[Any]]:
    """Every row of every table."""
    return {
        table.name: sorted(map(repr, await services.database.fetch(sa.select(table), {})))
        for table in metadata.sorted_tables
    }


@pytest.fixture
async def by_history(app: FastAPI, filled: Services) -> str:
    """A served model whose user vectors are pooled from the users' latest items."""
    version = await publish_model(filled, users="history", epochs=3)
    await app.state.recommend.models.refresh()
    return version


@pytest.mark.slow
@ON_SQLITE
async def test_a_known_users_items_give_the_users_own_list(
    app: FastAPI, client: httpx2.AsyncClient, by_history: str
) -> None:
    """Where vectors are pooled from items the two are one, whoever the basket is from."""
    for user in USERS[:20]:
        own = await ask(client, user)
        answer = await post(client, "/recommend", items=seen_by(user))
        assert ids(answer) == ids(own)
        assert sources(answer) == ["fold_in"] * 10
        assert [item["score"] for item in answer["items"]] == pytest.approx(
            [item["score"] for item in own["items"]], abs=1e-4
        )


async def test_a_basket_counts_as_its_events_would_and_stores_nothing(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    """The same list follows, once they are posted: to a user of the model and to a stranger."""
    services: Services = app.state.services
    basket = [item for item in ITEMS if item not in seen_by("user-1")][:4]
    before = await contents(services)
    for user in ("user-1", "stranger"):
        answer = await post(client, "/recommend", user=user, items=basket)
        assert (answer["user"], answer["model_version"]) == (user, trained)
        assert (answer["ignored"], sources(answer)) == ([], ["fold_in"] * 10)
        assert not {*ids(answer)} & {*basket}
        assert await contents(services) == before
        rows = [{"user": user, "item": item} for item in basket]
        await client.post("/events", json=rows)
        posted = await ask(client, user)
        assert posted["items"] == answer["items"]
        assert posted["as_of_seq"] == answer["as_of_seq"] + len(basket)
        before = await contents(services)


@ON_SQLITE
async def test_the_order_counts_and_a_repeated_item_at_its_last_place(
    app: FastAPI, client: httpx2.AsyncClient, by_history: str
) -> None:
    basket = ITEMS[:8]
    forward = await post(client, "/recommend", items=basket)
    backward = await post(client, "/recommend", items=basket[::-1])
    assert forward["items"] != backward["items"]
    again = await post(client, "/recommend", items=[*basket[:2], *basket, basket[0]])
    moved = await post(client, "/recommend", items=[*basket[1:], basket[0]])
    assert again["items"] == moved["items"]


@ON_SQLITE
async def test_what_is_looked_at_counts_beside_the_users_taste(
    app: FastAPI, client: httpx2.AsyncClient, by_history: str
) -> None:
    """The list moves towards the item, and still differs from user to user."""
    model = serving(app)
    space, rows = model.engine.item_space.vectors, {i: r for r, i in enumerate(model.item_ids)}

    def alike(item: str, answer: dict[str, Any]) -> float:
        return sum(float(space[rows[item]] @ space[rows[other]]) for other in ids(answer))

    nearer = 0.0
    for user in USERS[:10]:
        for item in ITEMS[:50:10]:
            with_item = await post(client, "/recommend", user=user, item=item)
            assert item not in ids(with_item)
            assert (
                with_item["items"]
                == (await post(client, "/recommend", user=user, items=[item], exclude=[item]))[
                    "items"
                ]
            )
            nearer += alike(item, with_item) - alike(item, await ask(client, user, exclude=item))
    assert nearer > 0
    lists = [ids(await post(client, "/recommend", user=user, item=ITEMS[0])) for user in USERS[:5]]
    assert len({tuple(shown) for shown in lists}) > 1
    kept = await post(client, "/recommend", item=ITEMS[0], exclude_seen=False, n=1000)
    assert ITEMS[0] not in ids(kept)
    basket = await post(client, "/recommend", items=[ITEMS[0]], exclude_seen=False, n=1000)
    assert ITEMS[0] in ids(basket)


@ON_SQLITE
async def test_options_are_those_of_a_list(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    plain = await post(client, "/recommend", items=ITEMS[:3])
    assert plain["user"] is None
    without = await post(client, "/recommend", items=ITEMS[:3], exclude=ids(plain)[:2], n=8)
    assert ids(without) == ids(plain)[2:]
    genres = {i["categories"][0] for i in (await client.get("/items?n=1000")).json()["items"]}
    for genre in genres:
        some = await post(client, "/recommend", items=ITEMS[:3], category=[genre], n=3)
        full = await post(client, "/recommend", items=ITEMS[:3], category=[genre], n=50)
        assert ids(some) == ids(full)[:3]
    explained = await post(client, "/recommend", items=ITEMS[:3], explain="pairwise")
    assert ids(explained) == ids(plain)
    named = {own["id"] for item in explained["items"] for own in item["because"]}
    assert named
    assert named <= {*ITEMS[:3]}
    assert ids(await post(client, "/recommend", items=ITEMS[:3], diversity=0.9)) != ids(plain)
    alone = await post(client, "/recommend", user="user-1")
    assert alone["items"] == (await ask(client, "user-1"))["items"]
    nobody = await post(client, "/recommend", items=[])
    assert sources(nobody) == ["popular"] * 10


@ON_SQLITE
async def test_a_basket_ranked_once_is_in_the_cache(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    cache = app.state.recommend.lists.cache
    first = await post(client, "/recommend", items=ITEMS[:3])
    hits = cache.hits
    again = await post(client, "/recommend", items=ITEMS[:3])
    assert again["items"] == first["items"]
    assert cache.hits > hits
    assert again["recommendation_id"] != first["recommendation_id"]


async def test_unknown_items_are_named_and_left_out(
    client: httpx2.AsyncClient, trained: str
) -> None:
    known = await post(client, "/recommend", items=ITEMS[:3])
    some = await post(
        client, "/recommend", items=["x", ITEMS[0], "y", *ITEMS[1:3], "x"], item="nowhere"
    )
    assert some["items"] == known["items"]
    assert some["ignored"] == ["y", "x", "nowhere"]
    strangers = await post(client, "/recommend", items=["x"])
    assert (sources(strangers), strangers["ignored"]) == (["popular"] * 10, ["x"])
    # Known to the service, and not to the model: it is left out as seen, and says nothing.
    await client.put("/items/late", json={})
    late = await post(client, "/recommend", items=["late"], n=1000)
    assert (late["ignored"], {*sources(late)}) == ([], {"popular"})
    assert "late" not in ids(late)


async def test_without_a_model_it_is_the_popular_list_without_the_basket(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    popular = ids(await ask(client, "stranger", n=20))
    answer = await post(client, "/recommend", items=popular[:3], item=popular[3])
    assert (answer["model_version"], sources(answer)) == (None, ["popular"] * 10)
    assert not {*ids(answer)} & {*popular[:4]}


@ON_SQLITE
async def test_bad_input(client: httpx2.AsyncClient, trained: str) -> None:
    for body in (
        {},
        {"n": 5},
        {"user": None, "items": None, "item": None},
        {"items": "tea"},
        {"items": [1]},
        {"items": [""]},
        {"items": ["a\0b"]},
        {"items": ["x" * 257]},
        {"item": ["tea"]},
        {"user": 7, "items": ["tea"]},
        {"items": ["tea"], "n": 0},
        {"items": ["tea"], "n": 1001},
        {"items": ["tea"], "diversity": 2},
        {"items": ["tea"], "basket": ["tea"]},
    ):
        assert await refused(client, "/recommend", **body) == (422, "invalid_request"), body
    for content in (b"", b"[", b"\xff"):
        response = await client.post(
            "/recommend", content=content, headers={"Content-Type": "application/json"}
        )
        assert (response.status_code, response.json()["code"]) == (400, "malformed_json")
    assert (await client.post("/recommend", content=b"{}")).status_code == 415
    assert await refused(client, "/recommend", items=ITEMS * 21) == (413, "too_many_items")
    assert await refused(client, "/recommend", items=ITEMS[:1], model="none") == (
        404,
        "unknown_model",
    )
    assert await refused(client, "/recommend", items=ITEMS[:1], min_seq=10**9) == (
        409,
        "seq_not_reached",
    )
    assert (await client.post("/recommend?n=3", json={"items": []})).status_code == 422


@ON_SQLITE
async def test_a_body_that_comes_slowly_holds_no_place_of_lists(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.recommend.endpoints.BODY_SECONDS", 0.05)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    json = {"Content-Type": "application/json"}
    response = await client.post("/recommend", content=slowly(), headers=json)
    assert (response.status_code, response.json()["code"]) == (400, "body_too_slow")


@ON_SQLITE
async def test_a_token_is_for_its_own_user(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    services: Services = app.state.services
    _, key = await services.keys.create("shop", [Role.TOKENS, Role.RECOMMEND])
    async with client_of(app, **{"X-API-Key": key}) as shop:
        made = await post(shop, "/tokens", user="user-1", ttl_s=60)
    async with client_of(app, Authorization=f"Bearer {made['token']}") as browser:
        assert (await post(browser, "/recommend", user="user-1", items=ITEMS[:2]))["items"]
        for body in ({"user": "user-2"}, {"items": ITEMS[:2]}):
            assert await refused(browser, "/recommend", **body) == (403, "other_user")
