"""Popular and trending items: counted as a literal count over the events does."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.tables import now_us
from app.recommend import cursor as cursors
from app.recommend import recent_popularity as module
from app.recommend.recent_popularity import HOUR_US, RecentPopularity, hours_of
from app.wiring import Services
from tests.app.conftest import publish_model, until

pytestmark = pytest.mark.anyio


async def ids(client: httpx2.AsyncClient, path: str, **params: Any) -> list[tuple[str, int]]:
    answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    items = answer.json()["items"]
    assert [item["rank"] for item in items] == list(range(1, len(items) + 1))
    return [(item["id"], item["users"]) for item in items]


def row(user: str, item: str, hours_ago: float, **fields: Any) -> dict[str, Any]:
    return {"user": user, "item": item, "timestamp": now_us() / 1e6 - hours_ago * 3600, **fields}


def recounted(app: FastAPI) -> None:
    recent: RecentPopularity = app.state.recommend.recent
    recent._counts.clear()


async def test_windows_count_each_user_once_an_item(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    rng = random.Random(3)
    rows = [
        row(f"u{rng.randrange(9)}", f"i{rng.randrange(7)}", rng.uniform(0, 100), type=kind)
        for kind in ["click"] * 150 + ["dislike"] * 40
    ]
    for start in range(0, len(rows), 10):
        assert (await client.post("/events", json=rows[start : start + 10])).status_code == 200
    now = now_us() / 1e6
    for window, hours in (("1h", 1), ("24h", 24), ("1d", 24), ("3d", 72), (None, None)):
        users: dict[str, set[str]] = {}
        for event in rows:
            recent = hours is None or event["timestamp"] >= now - hours * 3600
            if recent and event["type"] != "dislike":
                users.setdefault(event["item"], set()).add(event["user"])
        params = {} if window is None else {"window": window}
        found = await ids(client, "/popular", n=100, **params)
        assert dict(found) == {item: len(who) for item, who in users.items()}, window
        assert [n for _, n in found] == sorted((n for _, n in found), reverse=True)
        assert await ids(client, "/popular", n=2, **params) == found[:2]


async def test_old_events_that_come_in_now_are_not_recent(client: httpx2.AsyncClient) -> None:
    rows = [row("ann", "old", 2_000), row("ann", "new", 0.1), row("ben", "future", -5)]
    await client.post("/events", json=rows)
    # One with a time to come counts at the time when it was accepted.
    found = await ids(client, "/popular", window="30d")
    assert sorted(found) == [("future", 1), ("new", 1)]


async def test_items_that_rise_are_trending(client: httpx2.AsyncClient) -> None:
    now_and_before = {"steady": (5, 5), "small": (3, 1), "large": (30, 10), "new": (4, 0)}
    now_and_before |= {"falling": (2, 9), "gone": (0, 4)}
    rows = []
    for item, (now, before) in now_and_before.items():
        rows += [row(f"u{n}", item, 1) for n in range(now) for _ in range(2)]
        rows += [row(f"u{n}", item, 30) for n in range(before)]
    rows.append(row("u0", "large", 60))  # before both windows
    await client.post("/events", json=rows)
    found = (await client.get("/trending")).json()
    assert found["window"] == "1d"
    numbers = [(item["id"], item["users"], item["users_before"]) for item in found["items"]]
    assert numbers == [("large", 30, 10), ("new", 4, 0), ("small", 3, 1)]
    assert [name for name, _ in await ids(client, "/trending", n=1)] == ["large"]


async def test_hidden_and_deleted_items_are_never_shown(client: httpx2.AsyncClient) -> None:
    items: list[dict[str, Any]] = [
        {"id": name, "categories": [name[0]]} for name in ("x1", "x2", "y1", "unused")
    ]
    items[1]["attributes"] = {"color": "red"}
    await client.post("/items", json=items)
    await client.post("/events", json=[row(f"u{n}", i, 1) for n in range(3) for i in ("x1", "x2")])
    await client.post("/events", json=[row("u", "y1", 1)])
    for path, params in (("/popular", {}), ("/popular", {"window": "2d"}), ("/trending", {})):
        assert await ids(client, path, **params) == [("x1", 3), ("x2", 3), ("y1", 1)]
        assert await ids(client, path, category="x", **params) == [("x1", 3), ("x2", 3)]
        assert await ids(client, path, category=["y", "none"], **params) == [("y1", 1)]
        assert await ids(client, path, category="none", **params) == []
        assert await ids(client, path, filter='{"color":"red"}', **params) == [("x2", 3)]
        refused = await client.get(path, params={"filter": '{"color":{"lt":3}}'} | params)
        assert (refused.status_code, refused.json()["code"]) == (422, "filter_type_mismatch")
        await client.patch("/items/x1", json={"hidden": True})
        assert await ids(client, path, **params) == [("x2", 3), ("y1", 1)]
        await client.patch("/items/x1", json={"hidden": False})
    await client.delete("/items/x2")
    for path in ("/popular", "/popular?window=2d", "/trending"):
        assert await ids(client, path) == [("x1", 3), ("y1", 1)]


async def test_counts_follow_events_deletions_and_merges(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    rows = [row(user, "a", 1, event_id=f"{user} a") for user in ("ann", "visitor", "ben")]
    await client.post("/events", json=[*rows, row("visitor", "b", 30, event_id="old")])
    assert await ids(client, "/popular", window="1d") == [("a", 3)]
    await client.post("/users/visitor/merge", json={"into": "ann"})
    await client.delete("/events/ben%20a")
    await client.post("/events", json=[row("ben", "c", 0)])
    recounted(app)
    assert await ids(client, "/popular", window="1d") == [("a", 1), ("c", 1)]
    assert await ids(client, "/popular", window="2d") == [("a", 1), ("b", 1), ("c", 1)]


async def test_many_requests_count_once_and_old_counts_are_served_meanwhile(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    await client.post("/events", json=[row("ann", "a", 0)])
    count, calls, go = services.events.users_by_item, 0, asyncio.Event()

    async def slow(*window: int) -> list[tuple[int, int, int]]:
        nonlocal calls
        calls += 1
        if calls > 1:
            await go.wait()
        return await count(*window)

    monkeypatch.setattr(services.events, "users_by_item", slow)
    found = await asyncio.gather(*(ids(client, "/popular", window="1h") for _ in range(20)))
    assert (calls, found) == (1, [[("a", 1)]] * 20)
    monkeypatch.setattr("app.recommend.recent_popularity.MIN_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("app.recommend.recent_popularity.REFRESH_SHARE", 1e9)
    recounted(app)
    go.set()
    await ids(client, "/popular", window="1h")
    go.clear()
    await client.post("/events", json=[row("ben", "a", 0)])

    async def shows(users: int) -> bool:
        return await ids(client, "/popular", window="1h") == [("a", users)]

    assert await shows(1)
    await until(lambda: calls == 3)
    assert await shows(1)  # while the next count is under way
    go.set()
    await until(lambda: shows(2))


async def test_a_count_that_takes_long_or_fails_is_503(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*window: int) -> list[tuple[int, int, int]]:
        raise ConnectionError("no database")

    monkeypatch.setattr("app.recommend.recent_popularity.FIRST_COUNT_SECONDS", 0.05)
    monkeypatch.setattr(app.state.services.events, "users_by_item", fails)
    answer = await client.get("/trending")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")


@pytest.mark.parametrize("window", ["0h", "25h", "31d", "1w", "", "1", "h", "-1d", "01h", "1d\n"])
@pytest.mark.parametrize("path", ["/popular", "/trending"])
async def test_a_window_that_is_none_is_refused(
    shared_client: httpx2.AsyncClient, path: str, window: str
) -> None:
    answer = await shared_client.get(path, params={"window": window})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await shared_client.get(path, params={"n": 0})).status_code == 422


def test_the_hours_of_a_window() -> None:
    assert [hours_of(window) for window in ("1h", "24h", "1d", "30d")] == [1, 24, 24, 720]
    assert HOUR_US == 3_600_000_000


async def all_pages(client: httpx2.AsyncClient, path: str, **params: Any) -> list[dict[str, Any]]:
    found = [(await client.get(path, params=params)).json()]
    while cursor := found[-1]["next_cursor"]:
        answer = await client.get(path, params=params | {"cursor": cursor})
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
    return found


def shown(pages: list[dict[str, Any]]) -> list[str]:
    items = [item for page in pages for item in page["items"]]
    assert [item["rank"] for item in items] == list(range(1, len(items) + 1))
    return [item["id"] for item in items]


RISING = [row(f"u{n}", f"i{item:02}", 1) for item in range(25) for n in range(2 + item // 3)]
LISTS = [("/popular", {}), ("/popular", {"window": "7d"}), ("/trending", {"window": "1d"})]


@pytest.mark.parametrize(("path", "params"), LISTS)
async def test_pages_are_the_one_long_list(
    client: httpx2.AsyncClient, path: str, params: dict[str, Any]
) -> None:
    rows = [{"id": f"i{n:02}", "categories": ["odd" if n % 2 else "even"]} for n in range(25)]
    rows[3]["attributes"] = rows[4]["attributes"] = {"color": "red"}
    await client.post("/items", json=rows)
    await client.post("/events", json=RISING)
    for more in ({}, {"category": "odd"}, {"filter": '{"color": "red"}'}, {"n": 25}, {"n": 24}):
        wanted: dict[str, Any] = params | more
        whole = (await client.get(path, params=wanted | {"n": 1000})).json()
        assert whole["next_cursor"] is None
        pages = await all_pages(client, path, **{"n": 4} | wanted)
        assert [item for page in pages for item in page["items"]] == whole["items"]
        assert len(pages) == max(1, -(-len(whole["items"]) // wanted.get("n", 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "params"), LISTS)
async def test_pages_have_no_repeats_while_the_order_changes(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, path: str, params: dict[str, Any]
) -> None:
    await client.post("/events", json=RISING)
    query = params | {"n": 4}
    pages = [(await client.get(path, params=query)).json()]
    # The last become the first, and a new model is served.
    late = [row(f"late{n}", item, 0.5) for item in ("i00", "i01", "i02", "new") for n in range(40)]
    await client.post("/events", json=late)
    await publish_model(app.state.services, seed=5)
    await app.state.recommend.models.refresh()
    recounted(app)
    first = pages[0]["items"][0]["id"]
    second = (await client.get(path, params=query | {"cursor": pages[0]["next_cursor"]})).json()
    pages.append(second)
    if path == "/trending" or params:
        assert "new" in [item["id"] for item in second["items"]]  # the list is counted again once
    hidden = (await client.get(path, params=query | {"cursor": second["next_cursor"]})).json()
    await client.patch(f"/items/{hidden['items'][0]['id']}", json={"hidden": True})
    await client.post("/events", json=[row(f"x{n}", "i05", 0.1) for n in range(90)])
    recounted(app)
    while cursor := pages[-1]["next_cursor"]:
        pages.append((await client.get(path, params=query | {"cursor": cursor})).json())
    found = shown(pages)
    assert len(found) == len(set(found))
    assert found[0] == first
    assert hidden["items"][0]["id"] not in found
    assert [item["id"] for item in pages[2]["items"]][:3] == [
        item["id"] for item in hidden["items"][1:]
    ]  # the order stays from the second page on
    assert {f"i{n:02}" for n in range(25)} - {hidden["items"][0]["id"]} <= set(found)


async def test_deep_pages_look_through_the_catalogue_once(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post("/events", json=RISING)
    calls = 0
    find = module._find_places

    def counted(*arguments: Any) -> list[int]:
        nonlocal calls
        calls += 1
        return find(*arguments)

    monkeypatch.setattr(module, "_find_places", counted)
    for path, params in LISTS:
        calls = 0
        assert len(await all_pages(client, path, n=2, **params)) == 13
        assert calls == 2  # the first page, and all the others together


async def test_cursors_of_other_lists_and_old_ones_are_refused(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post("/events", json=RISING)
    popular = (await client.get("/popular", params={"n": 2})).json()["next_cursor"]
    trending = (await client.get("/trending", params={"n": 2})).json()["next_cursor"]
    recommended = (await client.get("/recommend/u0", params={"n": 2})).json()["next_cursor"]
    for path, params, cursor in (
        ("/popular", {"window": "7d"}, popular),
        ("/popular", {"category": "odd"}, popular),
        ("/popular", {"filter": '{"color": "red"}'}, popular),
        ("/popular", {}, trending),
        ("/popular", {}, recommended),
        ("/popular", {}, popular[:-1]),
        ("/popular", {}, "x"),
        ("/popular", {}, "ü"),
        ("/trending", {}, popular),
        ("/trending", {"window": "2d"}, trending),
        ("/recommend/None", {}, popular),
        ("/recommend/popular%20None", {}, popular),
        ("/items/i03/similar", {}, popular),
    ):
        answer = await client.get(path, params=params | {"cursor": cursor})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_cursor"), path
    too_long = await client.get("/popular", params={"cursor": "x" * 5_000})
    assert too_long.status_code == 422
    for path, cursor in (("/popular", popular), ("/trending", trending)):
        good = await client.get(path, params={"cursor": cursor, "n": 5})
        assert good.json()["items"][0]["rank"] == 3
    now = time.time()
    monkeypatch.setattr(cursors.time, "time", lambda: now + 2 * cursors.MAX_AGE_SECONDS)
    old = await client.get("/popular", params={"cursor": popular})
    assert (old.status_code, old.json()["code"]) == (422, "invalid_cursor")


async def test_no_list_is_longer_than_a_thousand_places(client: httpx2.AsyncClient) -> None:
    for start in range(0, 1_100, 550):
        rows = [{"user": "ann", "item": f"i{n}"} for n in range(start, start + 550)]
        assert (await client.post("/events", json=rows)).status_code == 200
    pages = await all_pages(client, "/popular", n=300)
    assert [len(page["items"]) for page in pages] == [300, 300, 300, 100]
    assert len(set(shown(pages))) == 1_000
