"""Answers are what the OpenAPI document says of them, with nothing that it does not name."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from jsonschema_rs import Draft202012Validator, ValidationError

from tests.app.recommend.conftest import ITEMS, USERS

pytestmark = pytest.mark.anyio


def validator_of(document: dict[str, Any], path: str, method: str) -> Draft202012Validator:
    """Of a route's answer 200, whose objects have no other properties than the declared ones."""
    schemas = {
        name: schema | ({"additionalProperties": False} if "properties" in schema else {})
        for name, schema in document["components"]["schemas"].items()
    }
    answer = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]
    return Draft202012Validator(answer["schema"] | {"components": {"schemas": schemas}})


INCLUDED: list[dict[str, Any]] = [{}, {"include": ["categories", "attributes"]}]
BASKETS: list[dict[str, Any]] = [
    {"user": USERS[0]},
    {"user": "nobody-yet"},
    {"items": ITEMS[:3]},
    {"items": ["unknown", ITEMS[0]], "item": ITEMS[5], "user": USERS[1]},
    {"item": "unknown"},
    {"user": USERS[2], "explain": "pairwise"},
    {"items": ITEMS[:2], "explain": "pairwise", "exclude_seen": False},
    {"user": USERS[3], "n": 1_000},
    {"user": USERS[4], "diversity": 0.5, "n": 3},
    {"user": USERS[5], "boost": [{"filter": {"color": "red"}, "by": 3}]},
    {"user": USERS[6], "filter": {"color": "red"}},
]


async def answered(response: httpx2.Response, validator: Draft202012Validator) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    validator.validate(answer)
    return answer


async def test_lists_by_a_basket(client: httpx2.AsyncClient, trained: str) -> None:
    rows = [{"id": ITEMS[n], "title": "x", "attributes": {"color": "red"}} for n in (3, 4)]
    await client.post("/items", json=rows)
    document = (await client.get("/openapi.json")).json()
    validator = validator_of(document, "/recommend", "post")
    for body in BASKETS:
        for more in INCLUDED:
            answer = await answered(await client.post("/recommend", json=body | more), validator)
            shown = [item for item in answer["items"] if "categories" in item]
            assert len(shown) == (len(answer["items"]) if more else 0)
            while cursor := answer["next_cursor"]:
                following = body | more | {"cursor": cursor}
                response = await client.post("/recommend", json=following)
                answer = await answered(response, validator)
    with pytest.raises(ValidationError, match="'more'"):
        validator.validate(answer | {"more": 1})


async def test_similar_items(client: httpx2.AsyncClient, trained: str) -> None:
    await client.post("/items", json=[{"id": "bare"}, {"id": ITEMS[3], "attributes": {"a": 1}}])
    await client.post("/events", json=[{"user": u, "item": "unfitted"} for u in USERS[:3]])
    document = (await client.get("/openapi.json")).json()
    validator = validator_of(document, "/items/{item}/similar", "get")
    for item in (*ITEMS[:3], "bare", "unfitted"):
        for params in ({}, {"n": 1000}, {"user": USERS[0]}, {"include": "categories,attributes"}):
            url, wanted = f"/items/{item}/similar", dict(params)
            answer = await answered(await client.get(url, params=wanted), validator)
            while cursor := answer["next_cursor"]:
                wanted["cursor"] = cursor
                answer = await answered(await client.get(url, params=wanted), validator)


async def test_lists_of_users_batches_popular_and_trending_ones(
    client: httpx2.AsyncClient, trained: str
) -> None:
    document = (await client.get("/openapi.json")).json()
    one = validator_of(document, "/recommend/{user}", "get")
    for user in (USERS[0], "nobody-yet"):
        for params in ({}, {"explain": "pairwise"}, {"include": "categories"}):
            await answered(await client.get(f"/recommend/{user}", params=params), one)
    rerank = validator_of(document, "/rerank", "post")
    await answered(
        await client.post("/rerank", json={"user": USERS[0], "items": [*ITEMS[:4], "x"]}), rerank
    )
    for path in ("/popular", "/trending"):
        await answered(await client.get(path, params={"n": 3}), validator_of(document, path, "get"))
