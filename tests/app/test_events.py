"""Events over HTTP: what is accepted once, what is refused, and what comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.events.service import EventService

pytestmark = pytest.mark.anyio


async def _post(client: httpx2.AsyncClient, body: Any) -> dict[str, Any]:
    response = await client.post("/events", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert set(answer) == {"accepted", "duplicates", "rejected", "last_seq"}
    return answer


async def _history(client: httpx2.AsyncClient, user: str) -> list[dict[str, Any]]:
    response = await client.get(f"/users/{user}/events", params={"n": 1000})
    assert response.status_code == 200, response.text
    items: list[dict[str, Any]] = response.json()["items"]
    return items


def _service(app: FastAPI) -> EventService:
    service: EventService = app.state.services.events
    return service


async def test_one_event(client: httpx2.AsyncClient) -> None:
    answer = await _post(
        client,
        {
            "event_id": "e1",
            "user": "u",
            "item": "i",
            "type": "click",
            "value": 2,
            "timestamp": "2020-02-29T12:00:00.5+02:00",
            "recommendation_id": "r",
        },
    )
    assert answer == {"accepted": 1, "duplicates": 0, "rejected": [], "last_seq": 1}
    assert await _history(client, "u") == [
        {
            "seq": 1,
            "event_id": "e1",
            "user": "u",
            "item": "i",
            "type": "click",
            "value": 2.0,
            "timestamp": "2020-02-29T10:00:00.500000Z",
        }
    ]


async def test_a_list_is_answered_row_by_row(client: httpx2.AsyncClient) -> None:
    answer = await _post(
        client,
        [
            {"user": "a", "item": "x", "timestamp": 0},
            {"user": "", "item": "x"},
            {"user": "b", "item": "x", "timestamp": 1.5},
            "no object",
            {"user": "b", "item": "y"},
        ],
    )
    assert (answer["accepted"], answer["last_seq"]) == (3, 3)
    assert [(bad["index"], bad["code"]) for bad in answer["rejected"]] == [
        (1, "invalid_user"),
        (3, "invalid_event"),
    ]
    assert [event["item"] for event in await _history(client, "b")] == ["y", "x"]
    assert (await _history(client, "a"))[0]["timestamp"] == "1970-01-01T00:00:00Z"


async def test_a_retry_is_a_duplicate(client: httpx2.AsyncClient) -> None:
    rows = [{"event_id": f"e{i}", "user": "u", "item": f"i{i}"} for i in range(5)]
    first = await _post(client, rows)
    # Without a timestamp the retry comes later, and is the same event nevertheless.
    second = await _post(client, rows)
    assert second == {"accepted": 0, "duplicates": 5, "rejected": [], "last_seq": 5}
    assert first["last_seq"] == 5
    third = await _post(client, [*rows[:2], {"user": "u", "item": "new"}])
    assert (third["accepted"], third["duplicates"], third["last_seq"]) == (1, 2, 6)
    assert len(await _history(client, "u")) == 6


async def test_duplicates_and_conflicts_within_one_list(client: httpx2.AsyncClient) -> None:
    answer = await _post(
        client,
        [
            {"event_id": "e", "user": "u", "item": "i"},
            {"event_id": "e", "user": "u", "item": "i"},
            {"event_id": "e", "user": "u", "item": "other"},
        ],
    )
    assert (answer["accepted"], answer["duplicates"]) == (1, 1)
    assert [(bad["index"], bad["code"]) for bad in answer["rejected"]] == [(2, "event_id_conflict")]


async def test_other_content_is_a_conflict(client: httpx2.AsyncClient) -> None:
    event = {"event_id": "e", "user": "u", "item": "i", "value": 1, "timestamp": 10}
    await _post(client, event)
    changes: list[dict[str, Any]] = [
        {"user": "v"},
        {"item": "j"},
        {"type": "t"},
        {"value": 2},
        {"value": None},
        {"timestamp": 11},
        {"recommendation_id": "s"},
    ]
    for change in changes:
        answer = await _post(client, [{"user": "u", "item": "fine"}, {**event, **change}])
        assert (answer["accepted"], answer["duplicates"]) == (1, 0)
        assert [(bad["index"], bad["code"]) for bad in answer["rejected"]] == [
            (1, "event_id_conflict")
        ]
    # What was refused leaves no user or item behind.
    assert (await client.get("/users/v/events")).status_code == 404
    assert (await client.get("/items/j")).status_code == 404


async def test_all_rows_bad_is_200_and_an_empty_list_too(client: httpx2.AsyncClient) -> None:
    assert await _post(client, []) == {
        "accepted": 0,
        "duplicates": 0,
        "rejected": [],
        "last_seq": 0,
    }
    assert len((await _post(client, [1, None]))["rejected"]) == 2


async def test_more_than_the_limit_stores_nothing(client: httpx2.AsyncClient) -> None:
    rows = [{"user": "u", "item": "i"}] * 10_001
    response = await client.post("/events", json=rows)
    assert response.status_code == 413
    assert response.json()["code"] == "too_many_events"
    assert (await client.get("/users/u/events")).status_code == 404
    assert (await _post(client, rows[:10_000]))["accepted"] == 10_000


async def test_paging_is_newest_first_and_stable(client: httpx2.AsyncClient) -> None:
    await _post(client, [{"user": "u", "item": f"i{k}"} for k in range(25)])
    seen: list[int] = []
    cursor = None
    while True:
        params = {"n": "10"} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/users/u/events", params=params)).json()
        seen += [event["seq"] for event in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        # What arrives in between does not shift the pages.
        await _post(client, {"user": "u", "item": "later"})
    assert seen == list(range(25, 0, -1))


async def test_bad_paging_is_422(client: httpx2.AsyncClient) -> None:
    await _post(client, {"user": "u", "item": "i"})
    for query in (
        "n=0",
        "n=1001",
        "n=x",
        "n=-1",
        "cursor=",
        "cursor=!!",
        "cursor=YmJi",
        "cursor=1",
    ):
        response = await client.get(f"/users/u/events?{query}")
        assert response.status_code == 422, query


async def test_deleting_an_event_makes_what_is_cached_of_the_user_stale(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await _post(client, [{"event_id": "a/1", "user": "u", "item": "i"}, {"user": "u", "item": "j"}])
    before = await _service(app).profile("u")
    assert (await client.delete("/events/a%2F1")).status_code == 204
    assert (await client.delete("/events/a%2F1")).status_code == 404
    after = await _service(app).profile("u")
    assert len(after.seen) == 1
    assert after.last_seq > before.last_seq
    # The id is free again.
    assert (await _post(client, {"event_id": "a/1", "user": "u", "item": "k"}))["accepted"] == 1


async def test_erasing_a_user(app: FastAPI, client: httpx2.AsyncClient) -> None:
    await _post(client, [{"user": "u", "item": "i"}, {"user": "v", "item": "i"}])
    before = await _service(app).last_seq()
    assert (await client.delete("/users/u")).status_code == 204
    assert (await client.delete("/users/u")).status_code == 404
    assert (await client.get("/users/u/events")).status_code == 404
    assert (await _service(app).profile("u")).user_id is None
    assert await _service(app).last_seq() > before
    assert len(await _history(client, "v")) == 1
    await _post(client, {"user": "u", "item": "j"})
    assert [event["item"] for event in await _history(client, "u")] == ["j"]


async def test_the_profile_is_what_recommendations_need(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await _post(client, [{"user": "u", "item": item} for item in ("a", "b", "a")])
    await _post(client, {"user": "v", "item": "c"})
    profile = await _service(app).profile("u")
    catalogue = await app.state.services.catalog.catalogue(profile.catalog_seq)
    assert [catalogue.external_ids[item] for item in profile.seen] == ["a", "b", "a"]
    assert profile.seqs.tolist() == [1, 2, 3]
    assert (profile.last_seq, profile.event_seq) == (3, 4)
    unknown = await _service(app).profile("nobody")
    assert (unknown.user_id, unknown.last_seq, unknown.seen.tolist()) == (None, 0, [])
    assert unknown.event_seq == 4

    popularity = dict(await _service(app).popularity())
    assert popularity == {catalogue.internal_ids[name]: 1 for name in "abc"}
    assert [row[0] for row in await _service(app).new_events(2)] == [3, 4]
    assert await _service(app).external_users([profile.user_id or 0]) == {profile.user_id: "u"}


async def test_concurrent_clients_lose_nothing(app: FastAPI, client: httpx2.AsyncClient) -> None:
    async def one(k: int) -> list[int]:
        # All fight for the same users, items and, every other time, event ids.
        rows = [
            {"event_id": f"shared-{j}", "user": "s", "item": f"i{j}"}
            if j % 2
            else {"user": f"u{k % 3}", "item": f"i{j}"}
            for j in range(10)
        ]
        answers = await asyncio.gather(*(_post(client, row) for row in rows))
        return [sum(answer[key] for answer in answers) for key in ("accepted", "duplicates")]

    totals = await asyncio.gather(*(one(k) for k in range(12)))
    assert sum(accepted for accepted, _ in totals) == 12 * 5 + 5
    assert sum(duplicates for _, duplicates in totals) == 11 * 5
    assert [row[0] for row in await _service(app).new_events(0)] == list(range(1, 66))
    assert len(await _history(client, "s")) == 5
