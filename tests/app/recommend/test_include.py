"""`include=`: categories and attributes of the items that an answer has."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.wiring import Services
from tests.app.recommend.conftest import GENRES, ITEMS, ask, post, refused
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, ON_SQLITE]


def attributes(item: str) -> dict[str, Any]:
    return {"number": ITEMS.index(item), "deep": {"a": [1, None]}, "text": "x" * 300}


@pytest.fixture
async def described(filled: Services) -> Services:
    await filled.catalog.upsert_rows(
        [{"id": i, "categories": [GENRES[i]], "attributes": attributes(i)} for i in ITEMS]
    )
    return filled


async def test_every_answer_shows_what_is_asked_for(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, described: Services
) -> None:
    wanted = (
        ("categories", {"categories"}),
        ("attributes", {"attributes"}),
        ("attributes, categories", {"categories", "attributes"}),
    )
    for user in ("user-1", "nobody"):
        plain = await ask(client, user)
        for text, names in wanted:
            for _ in range(2):  # the second time the query string is known
                answer = await ask(client, user, include=text)
                check(answer["items"], plain["items"], names)
        hits = app.state.recommend.lists.cache.hits
        assert (await ask(client, user))["items"] == plain["items"]
        assert app.state.recommend.lists.cache.hits == hits + (user != "nobody")
    plain = await post(client, "/recommend/batch", users=["user-1", "nobody"])
    batch = await post(
        client, "/recommend/batch", users=["user-1", "nobody"], include=["attributes"]
    )
    for one, other in zip(batch["results"], plain["results"], strict=True):
        check(one["items"], other["items"], {"attributes"})
    items = ITEMS[:4]
    plain = await post(client, "/rerank", user="user-1", items=items)
    answer = await post(client, "/rerank", user="user-1", items=items, include=["categories"])
    check(answer["items"], plain["items"], {"categories"})
    answer = await post(
        client, "/rerank", user="user-1", items=["unknown"], include=["categories", "attributes"]
    )
    assert answer["items"][0]["categories"] == []
    assert answer["items"][0]["attributes"] == {}
    path = f"/items/{ITEMS[0]}/similar?n=3"
    plain = (await client.get(path)).json()
    assert plain["items"][0].keys() == {"id", "title", "score"}
    answer = (await client.get(path + "&include=attributes,categories")).json()
    check(answer["items"], plain["items"], {"categories", "attributes"})


def check(items: list[dict[str, Any]], plain: list[dict[str, Any]], names: set[str]) -> None:
    assert items
    for item, other in zip(items, plain, strict=True):
        assert item.keys() - other.keys() == names
        assert {name: item[name] for name in other} == other
        if "categories" in names:
            assert item["categories"] == [GENRES[item["id"]]]
        if "attributes" in names:
            assert item["attributes"] == attributes(item["id"])


async def test_a_change_shows_at_once(
    client: httpx2.AsyncClient, trained: str, described: Services
) -> None:
    item = (await ask(client, "user-1", n=1))["items"][0]["id"]
    await client.patch(f"/items/{item}", json={"attributes": {"number": -1}})
    answer = await ask(client, "user-1", n=1, include="attributes")
    assert answer["items"][0]["attributes"]["number"] == -1


async def test_a_detail_that_there_is_not(client: httpx2.AsyncClient) -> None:
    for text in ("titles", "categories,titles", ""):
        response = await client.get("/recommend/user-1", params={"include": text})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_include")
        assert "the details are attributes, categories" in response.json()["detail"]
    body = {"users": ["u"], "include": ["x"]}
    assert await refused(client, "/recommend/batch", **body) == (422, "invalid_include")
