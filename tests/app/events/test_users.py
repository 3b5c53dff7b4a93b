"""Routes of users and their attributes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.access import Role
from app.core.settings import Settings
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio


async def listed(client: httpx2.AsyncClient, path: str, **query: Any) -> list[str]:
    """The ids of all pages."""
    ids: list[str] = []
    cursor = None
    while True:
        params = query | ({} if cursor is None else {"cursor": cursor})
        page = (await client.get(path, params=params)).json()
        ids += [row["id"] for row in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return ids


async def test_a_user_is_created_changed_erased_and_created_again(
    client: httpx2.AsyncClient,
) -> None:
    assert (await client.get("/users/ann")).json()["code"] == "unknown_user"
    assert (await client.patch("/users/ann", json={})).json()["code"] == "unknown_user"

    created = await client.put("/users/ann", json={"attributes": {"age": 7, "deep": [None]}})
    assert created.status_code == 201
    assert created.json().keys() == {"id", "attributes", "created_at"}
    assert created.json()["attributes"] == {"age": 7, "deep": [None]}
    assert (await client.get("/users/ann")).json() == created.json()
    assert (await client.get("/users")).json() == {"items": [created.json()], "next_cursor": None}

    change = {"id": "ann", "attributes": {"age": None, "city": "Bern"}}
    patched = await client.patch("/users/ann", json=change)
    assert patched.json() == created.json() | {"attributes": {"deep": [None], "city": "Bern"}}
    assert (await client.patch("/users/ann", json={})).json() == patched.json()
    assert (await client.patch("/users/ann", json={"attributes": None})).json()["attributes"] == {}
    replaced = await client.put("/users/ann", json={"attributes": {"k": "v"}})
    assert (replaced.status_code, replaced.json()["attributes"]) == (200, {"k": "v"})

    assert (await client.delete("/users/ann")).status_code == 204
    assert (await client.get("/users/ann")).status_code == 404
    assert (await client.put("/users/ann", json={})).json()["attributes"] == {}


async def test_a_description_changes_no_event_and_an_event_no_description(
    client: httpx2.AsyncClient,
) -> None:
    await client.put("/users/ann", json={"attributes": {"age": 7}})
    event = {"event_id": "e", "user": "ann", "item": "i"}
    posted = (await client.post("/events", json=[event, event | {"event_id": "f"}])).json()
    assert (await client.get("/users/ann")).json()["attributes"] == {"age": 7}
    await client.put("/users/ann", json={})
    await client.post("/users", json=[{"id": "ann", "attributes": {"age": 8}}])
    history = (await client.get("/users/ann/events")).json()["items"]
    assert [event["event_id"] for event in history] == ["f", "e"]
    answer = (await client.get("/recommend/ann", params={"min_seq": posted["last_seq"]})).json()
    assert answer["as_of_seq"] == posted["last_seq"]


BAD_USERS: list[tuple[Any, str]] = [
    (1, "invalid_user"),
    ([], "invalid_user"),
    ({"title": "x"}, "unknown_field"),
    ({"attributes": 5}, "invalid_attributes"),
    ({"attributes": ["x"]}, "invalid_attributes"),
    ({"attributes": {"a": "x" * 20_000}}, "invalid_attributes"),
    ({"attributes": {"a": {"b\0": 1}}}, "invalid_attributes"),
    ({"id": 5}, "invalid_id"),
    ({"id": "other"}, "id_mismatch"),
]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize(("body", "code"), BAD_USERS)
async def test_an_invalid_description_is_refused(
    shared_client: httpx2.AsyncClient, method: str, body: Any, code: str
) -> None:
    await shared_client.put("/users/u", json={})
    answer = await shared_client.request(method, "/users/u", json=body)
    assert answer.status_code == (409 if code == "id_mismatch" else 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == code
    assert (await shared_client.get("/users/u")).json()["attributes"] == {}


async def test_a_list_has_a_verdict_for_each_row(client: httpx2.AsyncClient) -> None:
    rows = [
        {"id": "a", "attributes": {"n": 1}},
        {"attributes": {}},
        {"id": "b"},
        {"id": "a", "attributes": {"n": 2}},
        {"id": "c", "attributes": [1]},
    ]
    answer = (await client.post("/users", json=rows)).json()
    assert answer["accepted"] == 3
    assert [(row["index"], row["code"]) for row in answer["rejected"]] == [
        (1, "missing_id"), (4, "invalid_attributes")
    ]  # fmt: skip
    assert (await client.get("/users/a")).json()["attributes"] == {"n": 2}
    assert await listed(client, "/users") == ["b", "a"]
    many = [{"id": f"many-{n}"} for n in range(1_500)] + [{"id": 5}]
    answer = (await client.post("/users", json=many)).json()
    assert (answer["accepted"], [row["index"] for row in answer["rejected"]]) == (1_500, [1_500])
    assert (await client.post("/users", json={"id": "a"})).status_code == 422
    too_many = await client.post("/users", json=[{"id": "a"}] * 10_001)
    assert (too_many.status_code, too_many.json()["code"]) == (413, "too_many_users")


IDS = ["a", "A", "a%", "a_b", "axb", "a\\", "aé", "a\U0010ffff", "a\U0010ffffz", "b", "東京", "東"]


@pytest.mark.parametrize("path", ["/users", "/items"])
async def test_pages_hold_those_whose_id_begins_with_the_prefix(
    client: httpx2.AsyncClient, path: str
) -> None:
    await client.post(path, json=[{"id": name} for name in IDS])
    await client.post("/events", json={"user": "from an event", "item": "from an event"})
    everybody = ["from an event", *IDS[::-1]]
    assert await listed(client, path, n=2) == everybody
    for prefix in [
        "",
        "a",
        "A",
        "a%",
        "a_",
        "a\\",
        "aé",
        "a\U0010ffff",
        "東",
        "from",
        "none",
        "a" * 256,
    ]:
        expected = [name for name in everybody if name.startswith(prefix)]
        assert await listed(client, path, prefix=prefix) == expected, prefix
        assert await listed(client, path, prefix=prefix, n=1) == expected, prefix
    for bad in ("a" * 257, "a\0"):
        answer = await client.get(path, params={"prefix": bad})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_prefix")
    for bad in ("rubbish", "YjA6eA"):
        answer = await client.get(path, params={"cursor": bad})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_cursor")


async def test_a_prefix_narrows_a_category(client: httpx2.AsyncClient) -> None:
    rows = [{"id": f"{name}-{n}", "categories": [name]} for name in ("x", "y") for n in range(12)]
    await client.post("/items", json=rows)
    found = await listed(client, "/items", category="x", prefix="x-1", n=2)
    assert found == ["x-11", "x-10", "x-1"]
    assert await listed(client, "/items", category="x", prefix="y") == []


async def test_events_and_descriptions_create_a_user_once(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    """Whichever of them is first."""
    names = [f"u{n}" for n in range(20)]
    answers = await asyncio.gather(
        *(client.put(f"/users/{name}", json={"attributes": {"n": name}}) for name in names),
        *(client.post("/events", json={"user": name, "item": "i"}) for name in names),
        client.post("/users", json=[{"id": name, "attributes": {"n": name}} for name in names]),
    )
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert sorted(await listed(client, "/users")) == sorted(names)
    for name in names:
        assert (await client.get(f"/users/{name}")).json()["attributes"] == {"n": name}
        assert len((await client.get(f"/users/{name}/events")).json()["items"]) == 1


async def test_no_token_reads_or_writes_attributes(services: Services, settings: Settings) -> None:
    _, key = await services.keys.create("shop", [Role.READ, Role.INGEST, Role.TOKENS])
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app, **{"X-API-Key": key}) as client:
        await client.put("/users/ann", json={"attributes": {"vip": False}})
        token = (await client.post("/tokens", json={"user": "ann"})).json()["token"]
        headers = {"Authorization": f"Bearer {token}"}
    async with app.router.lifespan_context(app), client_of(app, **headers) as page:
        for method in ("GET", "PUT", "PATCH"):
            for user in ("ann", "ben"):
                body = None if method == "GET" else {"attributes": {"vip": True}}
                answer = await page.request(method, f"/users/{user}", json=body)
                assert answer.status_code == 403, (method, user)
        assert (await page.get("/users")).status_code == 403
        assert (await page.post("/users", json=[{"id": "ann"}])).status_code == 403
    assert (await services.users.get("ann")).attributes == {"vip": False}
