"""Routes of items."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
from fastapi import FastAPI

from app.catalog.service import CatalogService

pytestmark = pytest.mark.anyio


def _service(app: FastAPI) -> CatalogService:
    service: CatalogService = app.state.services.catalog
    return service


async def test_an_item_is_created_changed_deleted_and_created_again(
    client: httpx2.AsyncClient,
) -> None:
    assert (await client.get("/items/a")).status_code == 404
    assert (await client.patch("/items/a", json={})).status_code == 404
    assert (await client.delete("/items/a")).status_code == 404

    item = {"title": "A", "categories": ["x", "y", "x"], "attributes": {"k": 1, "l": [None]}}
    created = await client.put("/items/a", json=item)
    assert created.status_code == 201
    expected = {
        "id": "a",
        "title": "A",
        "categories": ["x", "y"],
        "hidden": False,
        "attributes": {"k": 1, "l": [None]},
        "available_from": None,
        "available_until": None,
        "embedding": None,
    }
    assert created.content == orjson.dumps(expected)
    assert (await client.get("/items/a")).content == created.content
    page = {"items": [expected], "next_cursor": None}
    assert (await client.get("/items")).content == orjson.dumps(page)

    patched = await client.patch("/items/a", json={"hidden": True, "attributes": {"k": None}})
    assert patched.json() == {**created.json(), "hidden": True, "attributes": {"l": [None]}}
    assert (await client.patch("/items/a", json={"title": None})).json()["title"] is None

    replaced = await client.put("/items/a", json={"id": "a"})
    assert replaced.status_code == 200
    assert replaced.json()["categories"] == []

    assert (await client.delete("/items/a")).status_code == 204
    assert (await client.get("/items/a")).status_code == 404
    assert (await client.get("/items")).json()["items"] == []
    assert (await client.put("/items/a", json=item)).status_code == 201


BAD_ITEMS: list[tuple[Any, str]] = [
    (1, "invalid_item"),
    ([], "invalid_item"),
    ({}, "missing_id"),
    ({"id": 1}, "invalid_id"),
    ({"id": "x" * 257}, "invalid_id"),
    ({"id": "a\0"}, "invalid_id"),
    ({"id": "a", "tilte": "x"}, "unknown_field"),
    ({"id": "a", "title": 1}, "invalid_title"),
    ({"id": "a", "title": "x" * 1025}, "invalid_title"),
    ({"id": "a", "title": "a\0"}, "invalid_title"),
    ({"id": "a", "categories": "x"}, "invalid_categories"),
    ({"id": "a", "categories": [1]}, "invalid_categories"),
    ({"id": "a", "categories": [""]}, "invalid_categories"),
    ({"id": "a", "categories": ["x" * 129]}, "invalid_categories"),
    ({"id": "a", "categories": [str(k) for k in range(65)]}, "invalid_categories"),
    ({"id": "a", "hidden": 1}, "invalid_hidden"),
    ({"id": "a", "hidden": 0.0}, "invalid_hidden"),
    ({"id": "a", "hidden": "yes"}, "invalid_hidden"),
    ({"id": "a", "hidden": []}, "invalid_hidden"),
    ({"id": "a", "attributes": []}, "invalid_attributes"),
    ({"id": "a", "attributes": {"k": "x" * 17_000}}, "invalid_attributes"),
    ({"id": "a", "attributes": {"k": ["a\0"]}}, "invalid_attributes"),
    ({"id": "a", "attributes": {"a\0": 1}}, "invalid_attributes"),
    ({"id": "a", "embedding": []}, "invalid_embedding"),
    ({"id": "a", "embedding": {"0": 1}}, "invalid_embedding"),
    ({"id": "a", "embedding": [1, "2"]}, "invalid_embedding"),
    ({"id": "a", "embedding": [1, True]}, "invalid_embedding"),
    ({"id": "a", "embedding": [1, None]}, "invalid_embedding"),
    ({"id": "a", "embedding": [-3.402823466385289e38]}, "invalid_embedding"),
    ({"id": "a", "embedding": [[1]]}, "invalid_embedding"),
    ({"id": "a", "embedding": [1e39]}, "invalid_embedding"),
    ({"id": "a", "embedding": [0.5] * 1_025}, "invalid_embedding"),
]


async def test_a_list_of_items_has_an_outcome_by_row(client: httpx2.AsyncClient) -> None:
    rows = [row for row, _ in BAD_ITEMS]
    good = [
        {"id": "a", "title": "first"},
        {"id": "b", "title": "x" * 1024, "attributes": {"k": "\\u0000", "n": 1.5e300}},
        {"id": "a", "title": "last"},
        {"id": "c", "title": "", "categories": None, "hidden": None, "attributes": None},
    ]
    response = await client.post("/items", json=rows + good)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["accepted"] == 4
    rejected = {bad["index"]: bad["code"] for bad in answer["rejected"]}
    assert rejected == dict(enumerate(code for _, code in BAD_ITEMS))
    assert (await client.get("/items/a")).json()["title"] == "last"
    assert (await client.get("/items/b")).json()["attributes"] == good[1]["attributes"]
    again = await client.post("/items", json=good)
    assert again.json() == {"accepted": 4, "rejected": []}


async def test_an_invalid_item_or_body_is_refused(client: httpx2.AsyncClient) -> None:
    await client.put("/items/a", json={})
    for row, code in BAD_ITEMS:
        if code == "missing_id":
            continue
        for method in ("PUT", "PATCH"):
            response = await client.request(method, "/items/a", json=row)
            assert (response.status_code, response.json()["code"]) == (422, code), row
    deep = b'{"attributes": {"k": ' + b"[" * 600 + b"]" * 600 + b"}}"
    headers = {"content-type": "application/json"}
    response = await client.put("/items/a", content=deep, headers=headers)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_attributes")
    for body, status in ((b"{", 400), (b'{"attributes": {"k": NaN}}', 400), (b"7", 422)):
        response = await client.put("/items/a", content=body, headers=headers)
        assert response.status_code == status, body
    for method in ("PUT", "PATCH"):
        # Path and body are valid by themselves: the OpenAPI document cannot express the rule.
        response = await client.request(method, "/items/a", json={"id": "b"})
        assert (response.status_code, response.json()["code"]) == (409, "id_mismatch")
    assert (await client.post("/items", json={"id": "a"})).status_code == 422
    too_many = await client.post("/items", json=[{"id": "a"}] * 10_001)
    assert (too_many.status_code, too_many.json()["code"]) == (413, "too_many_items")


async def test_item_pages_are_newest_first_and_filtered_by_category(
    client: httpx2.AsyncClient,
) -> None:
    await client.post(
        "/items",
        json=[{"id": f"i{k}", "categories": ["all", f"c{k % 3}"]} for k in range(10)],
    )
    await client.delete("/items/i9")

    async def ids(query: str) -> list[str]:
        names: list[str] = []
        cursor = ""
        while True:
            page = (await client.get(f"/items?n=4{query}{cursor}")).json()
            names += [item["id"] for item in page["items"]]
            if page["next_cursor"] is None:
                return names
            assert len(page["items"]) == 4
            cursor = f"&cursor={page['next_cursor']}"

    everything = [f"i{k}" for k in range(8, -1, -1)]
    assert await ids("") == everything
    assert await ids("&category=all") == everything
    assert await ids("&category=c0") == ["i6", "i3", "i0"]
    assert await ids("&category=c0&category=c1") == ["i7", "i6", "i4", "i3", "i1", "i0"]
    assert await ids("&category=none") == []
    await client.patch("/items/i6", json={"categories": ["c1"]})
    assert await ids("&category=c0") == ["i3", "i0"]


async def test_events_create_items_but_do_not_restore_deleted_ones(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await client.post("/events", json={"user": "u", "item": "new"})
    assert (await client.get("/items/new")).json() == {
        "id": "new",
        "title": None,
        "categories": [],
        "hidden": False,
        "attributes": {},
        "available_from": None,
        "available_until": None,
        "embedding": None,
    }
    catalogue = await _service(app).catalogue()
    assert catalogue.visible[catalogue.internal_ids["new"]]
    await client.delete("/items/new")
    assert (await client.post("/events", json={"user": "u", "item": "new"})).json()["accepted"] == 1
    assert (await client.get("/items/new")).status_code == 404
    catalogue = await _service(app).catalogue()
    assert not catalogue.visible[catalogue.internal_ids["new"]]
    # The events stay, and name the item.
    history = (await client.get("/users/u/events")).json()["items"]
    assert [event["item"] for event in history] == ["new", "new"]


async def test_concurrent_events_and_descriptions_of_the_same_items(
    client: httpx2.AsyncClient,
) -> None:
    async def describe(k: int) -> None:
        for j in range(8):
            response = await client.put(f"/items/i{j}", json={"title": f"t{k}"})
            assert response.status_code in (200, 201)

    async def act(k: int) -> None:
        rows = [{"user": f"u{k}", "item": f"i{j}"} for j in range(7, -1, -1)]
        for _ in range(3):
            assert (await client.post("/events", json=rows)).json()["accepted"] == 8

    await asyncio.gather(*(describe(k) for k in range(4)), *(act(k) for k in range(4)))
    items = (await client.get("/items")).json()["items"]
    assert sorted(item["id"] for item in items) == [f"i{j}" for j in range(8)]
    assert all(item["title"] for item in items)
