"""Next pages of lists: no repeat and no gap, whatever happens between two of them."""

from __future__ import annotations

import asyncio
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from app.core.settings import Settings
from app.main import create_app
from app.recommend import cursor as cursors
from app.recommend.cursor import ListCursor, decode, packed_ids, unpacked_ids
from app.wiring import Services
from ncr_core.inference.retrieval import CandidateRetriever
from tests.app.conftest import publish_model
from tests.app.recommend.conftest import ITEMS, USERS, ask, ids, post, refused, serving
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio
Between = Callable[[int], Awaitable[None]]


async def no_change(page: int) -> None:
    """Nothing happens."""


async def pages(
    clients: list[httpx2.AsyncClient],
    user: str,
    between: Between = no_change,
    most: int = 200,
    **params: Any,
) -> list[dict[str, Any]]:
    """The pages of a list to its end, each from the next server in turn."""
    found = [await ask(clients[0], user, **params)]
    while found[-1]["next_cursor"] is not None and len(found) < most:
        await between(len(found))
        client = clients[len(found) % len(clients)]
        found.append(await ask(client, user, cursor=found[-1]["next_cursor"], **params))
    return found


def places(found: list[dict[str, Any]]) -> list[str]:
    return [item for answer in found for item in ids(answer)]


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**31), max_size=1000, unique=True))
def test_packed_ids_come_back(numbers: list[int]) -> None:
    shown = np.array(sorted(numbers), dtype=np.int64)
    assert unpacked_ids(packed_ids(shown)).tolist() == shown.tolist()


@given(st.binary(max_size=300))
def test_other_bytes_are_no_ids(content: bytes) -> None:
    try:
        assert len(unpacked_ids(content)) <= 1000
    except (ValueError, cursors.struct.error):
        pass


def test_a_cursor_of_999_among_a_million_items_is_shorter_than_2000_characters() -> None:
    rng = np.random.default_rng(1)
    shown = np.sort(rng.choice(1_000_000, 999, replace=False))
    cursor = ListCursor("20261124-220630-1b4c", 10**12, int(time.time()), shown, b"12345678")
    text = cursor.encode(b"user", b"digest")
    assert len(text) < 2000
    found = decode(text, b"user", b"digest")
    assert (found.version, found.last_seq, found.at, found.origin) == (
        *(cursor.version, cursor.last_seq, cursor.at),
        cursor.origin,
    )
    assert found.shown.tolist() == shown.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
@pytest.mark.parametrize("params", [{}, {"diversity": 0.6}, {"explain": "pairwise"}])
@ON_SQLITE
async def test_pages_are_the_one_long_list(
    app: FastAPI,
    client: httpx2.AsyncClient,
    filled: Services,
    kind: str,
    params: dict[str, Any],
) -> None:
    await publish_model(filled, model=kind, epochs=3, pretrain=False)
    await app.state.recommend.models.refresh()
    whole = await ask(client, "user-1", n=1000)
    found = await pages([client], "user-1", n=4, **params)
    first = await ask(client, "user-1", n=4, **params)
    assert found[0]["items"] == first["items"]
    shown = [item for answer in found for item in answer["items"]]
    assert [item["rank"] for item in shown] == list(range(1, len(whole["items"]) + 1))
    if "diversity" in params:  # the order is another, the items are the same
        assert sorted(places(found)) == sorted(ids(whole))
    else:
        assert places(found) == ids(whole)
        scores = {item["id"]: item["score"] for item in whole["items"]}
        assert {item["id"]: item["score"] for item in shown} == pytest.approx(scores, abs=2e-6)
    for answer in found:
        assert answer["items"][-1]["preferred_over_next"] is None
        assert all(item["preferred_over_next"] is not None for item in answer["items"][:-1])
        assert ("because" in answer["items"][0]) == ("explain" in params)
    assert len({answer["recommendation_id"] for answer in found}) == len(found)
    if "explain" in params:
        assert any(item["because"] for item in found[2]["items"])


@pytest.mark.slow
async def test_twenty_pages_while_events_and_a_new_model_come_in(
    servers: tuple[list[FastAPI], list[httpx2.AsyncClient]],
) -> None:
    """What the list had at first comes in its order, without what was taken up or hidden."""
    apps, clients = servers
    services: Services = apps[0].state.services
    await services.catalog.upsert_rows([{"id": f"i{n}"} for n in range(300)])
    rng = np.random.default_rng(5)
    rows = [
        {"user": f"u{user}", "item": f"i{item}"}
        for user in range(40)
        for item in rng.choice(300, 30, replace=False)
    ]
    await clients[0].post("/events", json=rows)
    first = await publish_model(services, epochs=3)
    for app in apps:
        await app.state.recommend.models.refresh()
    had = ids(await ask(clients[0], "u1", n=1000))
    assert len(had) == 270
    taken, hidden = [had[57], had[130], had[131], had[3]], had[90]

    async def between(page: int) -> None:
        if page in (1, 4, 9):
            rows = [{"user": "u1", "item": taken.pop()}, {"user": "u2", "item": f"i{page}"}]
            await clients[page % 2].post("/events", json=rows)
        if page == 5:
            await clients[0].patch(f"/items/{hidden}", json={"hidden": True})
            await clients[1].put("/items/late", json={})
        if page in (1, 4, 5, 9):
            await asyncio.sleep(0.15)  # by when the other server knows
        if page == 7:
            await publish_model(services, epochs=3, seed=8)
            for app in apps:
                await app.state.recommend.models.refresh()

    gone = {had[130], had[131], hidden}
    found = await pages(clients, "u1", between, most=20, n=10)
    shown = places(found)
    assert len(shown) == 200
    assert shown == [item for item in had if item not in gone][:200]
    assert {answer["model_version"] for answer in found} == {first}
    assert serving(apps[0]).version != first
    ranks = [item["rank"] for answer in found for item in answer["items"]]
    assert ranks == list(range(1, 201))


@pytest.mark.slow
@ON_SQLITE
async def test_it_goes_on_after_a_restart_and_where_the_version_is_gone(
    settings: Settings, filled: Services, app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    had = ids(await ask(client, "user-1", n=1000))
    found = await pages([client], "user-1", most=2, n=5)
    cursor = found[-1]["next_cursor"]
    again = create_app(settings)
    async with again.router.lifespan_context(again):
        transport = httpx2.ASGITransport(again)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as other:
            following = await ask(other, "user-1", n=5, cursor=cursor)
            assert ids(following) == had[10:15]
    # Another version, and the first one's files are gone: the rest comes, in another order.
    await publish_model(filled, epochs=5, seed=3)
    await app.state.recommend.models.refresh()
    app.state.recommend.pages._frozen._cache.clear()
    app.state.recommend.models.versions._max_models = 0
    rest = []
    while cursor is not None:
        answer = await ask(client, "user-1", n=5, cursor=cursor)
        assert answer["model_version"] != trained
        rest += ids(answer)
        cursor = answer["next_cursor"]
    assert sorted(rest) == sorted(had[10:])


@ON_SQLITE
async def test_deep_pages_search_the_catalogue_once(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = 0
    search = CandidateRetriever._search

    def counted(self: CandidateRetriever, *arguments: Any) -> Any:
        nonlocal searches
        searches += 1
        return search(self, *arguments)

    monkeypatch.setattr(CandidateRetriever, "_search", counted)
    before = await pages([client], "user-3", most=2, n=3)
    assert searches >= 1
    made = searches
    cursor = before[-1]["next_cursor"]
    while cursor is not None:
        cursor = (await ask(client, "user-3", n=3, cursor=cursor))["next_cursor"]
    assert searches == made


@ON_SQLITE
async def test_lists_of_newcomers_and_without_a_model_have_pages(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    for user in ("stranger", "user-1"):
        found = await pages([client], user, n=7)
        assert len(places(found)) == len({*places(found)})
        assert {*places(found)} == {*ids(await ask(client, user, n=1000))}


@ON_SQLITE
async def test_a_basket_has_pages(client: httpx2.AsyncClient, trained: str) -> None:
    for body in ({"items": ITEMS[:3]}, {"user": "user-1", "item": ITEMS[0]}, {"user": "user-1"}):
        had = ids(await post(client, "/recommend", n=1000, **body))
        answer = await post(client, "/recommend", n=6, **body)
        shown = ids(answer)
        while (cursor := answer["next_cursor"]) is not None:
            answer = await post(client, "/recommend", n=6, cursor=cursor, **body)
            assert answer["ignored"] == []
            shown += ids(answer)
        assert shown == had
    # The list of a batch goes on under its user.
    batch = await post(client, "/recommend/batch", users=["user-1"], n=6)
    cursor = batch["results"][0]["next_cursor"]
    had = ids(await ask(client, "user-1", n=1000))
    assert ids(await ask(client, "user-1", n=6, cursor=cursor)) == had[6:12]


@ON_SQLITE
async def test_a_page_may_have_another_length(client: httpx2.AsyncClient, trained: str) -> None:
    had = ids(await ask(client, "user-1", n=1000))
    cursor = (await ask(client, "user-1", n=2))["next_cursor"]
    answer = await ask(client, "user-1", n=20, cursor=cursor)
    assert ids(answer) == had[2:22]
    answer = await ask(client, "user-1", n=1000, cursor=answer["next_cursor"])
    assert (ids(answer), answer["next_cursor"]) == (had[22:], None)


@ON_SQLITE
async def test_a_cursor_of_another_list_is_refused(
    client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = str((await ask(client, "user-1", n=5))["next_cursor"])
    raw = bytearray(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    raw[12] ^= 1
    changed = urlsafe_b64encode(raw).decode().rstrip("=")
    users = {"user-2": cursor, "stranger": cursor}
    bad = ["", "x", "%00", cursor[:-1], cursor + "A", changed, "b10", "é", cursor.swapcase()]
    for user, text in [*users.items(), *(("user-1", text) for text in bad)]:
        response = await client.get(f"/recommend/{user}", params={"n": 5, "cursor": text})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor"), text
        assert response.headers["content-type"] == "application/problem+json"
    for params in (
        {"exclude": ITEMS[0]},
        {"category": "x"},
        {"exclude_seen": "false"},
        {"diversity": 0.5},
        {"model": trained},
    ):
        response = await client.get("/recommend/user-1", params={"cursor": cursor, **params})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor"), params
    for body in ({"user": "user-2"}, {"items": ITEMS[:2]}, {"user": "user-1", "items": ITEMS[:1]}):
        assert await refused(client, "/recommend", cursor=cursor, **body) == (422, "invalid_cursor")
    response = await client.get("/recommend/user-1", params={"cursor": "A" * 4097})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    for seconds in (2 * 86_400, -3600):
        now = time.time() + seconds
        monkeypatch.setattr(cursors.time, "time", lambda now=now: now)
        response = await client.get("/recommend/user-1", params={"cursor": cursor})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor")
        monkeypatch.undo()


@ON_SQLITE
async def test_no_list_is_longer_than_a_thousand_places(
    client: httpx2.AsyncClient, app: FastAPI
) -> None:
    services: Services = app.state.services
    await services.catalog.upsert_rows([{"id": f"i{n}"} for n in range(1200)])
    found = await pages([client], USERS[0], n=300)
    assert [len(answer["items"]) for answer in found] == [300, 300, 300, 100]
    assert len({*places(found)}) == 1000
    assert (await ask(client, USERS[0], n=1000))["next_cursor"] is None
