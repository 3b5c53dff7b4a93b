"""Routes of events, histories, users and preferences: valid requests, and bad preferences."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from app.core.settings import Settings
from app.events.service import EventService
from app.main import create_app
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


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


async def test_an_event_comes_back_in_the_history(client: httpx2.AsyncClient) -> None:
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
    event = {
        "seq": 1,
        "event_id": "e1",
        "user": "u",
        "item": "i",
        "type": "click",
        "value": 2.0,
        "timestamp": "2020-02-29T10:00:00.500000Z",
    }
    page = await client.get("/users/u/events")
    assert page.content == orjson.dumps({"items": [event], "next_cursor": None})


async def test_a_list_of_events_has_an_outcome_by_row(client: httpx2.AsyncClient) -> None:
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


async def test_a_retry_with_the_same_event_id_is_a_duplicate(client: httpx2.AsyncClient) -> None:
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


async def test_the_same_event_id_with_other_content_is_a_conflict(
    client: httpx2.AsyncClient,
) -> None:
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


async def test_only_rejected_rows_or_an_empty_list_is_200(client: httpx2.AsyncClient) -> None:
    assert await _post(client, []) == {
        "accepted": 0,
        "duplicates": 0,
        "rejected": [],
        "last_seq": 0,
    }
    assert len((await _post(client, [1, None]))["rejected"]) == 2


@pytest.mark.slow
async def test_a_list_above_the_limit_is_413_and_stores_nothing(client: httpx2.AsyncClient) -> None:
    rows = [{"user": "u", "item": "i"}] * 10_001
    response = await client.post("/events", json=rows)
    assert response.status_code == 413
    assert response.json()["code"] == "too_many_events"
    assert (await client.get("/users/u/events")).status_code == 404
    assert (await _post(client, rows[:10_000]))["accepted"] == 10_000


async def test_history_pages_are_newest_first_and_stable(client: httpx2.AsyncClient) -> None:
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


async def test_a_bad_cursor_or_page_size_is_422(client: httpx2.AsyncClient) -> None:
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


async def test_deleting_an_event_makes_the_cached_profile_stale(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await _post(client, [{"event_id": "a/1", "user": "u", "item": "i"}, {"user": "u", "item": "j"}])
    before = await _service(app).profiles.get("u")
    assert (await client.delete("/events/a%2F1")).status_code == 204
    assert (await client.delete("/events/a%2F1")).status_code == 404
    after = await _service(app).profiles.get("u")
    assert len(after.seen) == 1
    assert after.last_seq > before.last_seq
    # The id is free again.
    assert (await _post(client, {"event_id": "a/1", "user": "u", "item": "k"}))["accepted"] == 1


async def test_erasing_a_user_removes_their_events_and_profile(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await _post(client, [{"user": "u", "item": "i"}, {"user": "v", "item": "i"}])
    before = await _service(app).last_seq()
    assert (await client.delete("/users/u")).status_code == 204
    assert (await client.delete("/users/u")).status_code == 404
    assert (await client.get("/users/u/events")).status_code == 404
    assert (await _service(app).profiles.get("u")).user_id is None
    assert await _service(app).last_seq() > before
    assert len(await _history(client, "v")) == 1
    await _post(client, {"user": "u", "item": "j"})
    assert [event["item"] for event in await _history(client, "u")] == ["j"]


async def test_posted_events_are_in_profile_popularity_and_new_events(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await _post(client, [{"user": "u", "item": item} for item in ("a", "b", "a")])
    await _post(client, {"user": "v", "item": "c"})
    profile = await _service(app).profiles.get("u")
    catalogue = await app.state.services.catalog.catalogue(profile.catalog_seq)
    assert [catalogue.external_ids[item] for item in profile.seen] == ["a", "b", "a"]
    assert profile.seqs.tolist() == [1, 2, 3]
    assert (profile.last_seq, profile.event_seq) == (3, 4)
    unknown = await _service(app).profiles.get("nobody")
    assert (unknown.user_id, unknown.last_seq, unknown.seen.tolist()) == (None, 0, [])
    assert unknown.event_seq == 4

    seq, popularity = await _service(app).popularity()
    assert (seq, dict(popularity)) == (4, {catalogue.internal_ids[name]: 1 for name in "abc"})
    assert [row[0] for row in await _service(app).new_events(2)] == [3, 4]


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


async def test_a_preference_takes_the_next_seq_of_events(client: httpx2.AsyncClient) -> None:
    await client.post("/events", json=[{"user": "u", "item": i} for i in ("a", "b")])
    body = {"user": "new", "winner": "a", "loser": "b", "timestamp": 5}
    answer = await client.post("/preferences", json=body)
    assert (answer.status_code, answer.json()) == (201, {"seq": 3})
    # Once more, and the other way round: both are fine, and so is a cycle.
    assert (await client.post("/preferences", json=body)).json() == {"seq": 4}
    turned = {"user": "new", "winner": "b", "loser": "a"}
    assert (await client.post("/preferences", json=turned)).json() == {"seq": 5}
    after = await client.post("/events", json={"user": "u", "item": "c"})
    assert after.json()["last_seq"] == 6
    # The user is there, and has no events.
    history = await client.get("/users/new/events")
    assert (history.status_code, history.json()["items"]) == (200, [])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"user": "u", "winner": "a", "loser": "a"}, "same_item"),
        ({"user": "u", "winner": "nix", "loser": "nix"}, "same_item"),
        ({"user": "u", "winner": "a", "loser": "nix"}, "unknown_item"),
        ({"user": "u", "winner": "gone", "loser": "a"}, "unknown_item"),
        ({"user": "u", "winner": "a"}, "missing_loser"),
        ({"winner": "a", "loser": "b"}, "missing_user"),
        ({"user": "u", "winner": "a", "loser": 7}, "invalid_loser"),
        ({"user": "", "winner": "a", "loser": "b"}, "invalid_user"),
        ({"user": "u", "winner": "a", "loser": "b", "timestamp": "soon"}, "invalid_timestamp"),
        ({"user": "u", "winner": "a", "loser": "b", "value": 1}, "unknown_field"),
        ("a > b", "invalid_preference"),
    ],
)
async def test_an_invalid_preference_is_422_and_takes_no_seq(
    shared_client: httpx2.AsyncClient, body: object, code: str
) -> None:
    items = ("a", "b", "gone")
    events = [{"event_id": item, "user": "other", "item": item} for item in items]
    await shared_client.post("/events", json=events)
    await shared_client.delete("/items/gone")
    answer = await shared_client.post("/preferences", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert answer.headers["content-type"] == "application/problem+json"
    # Nothing was stored, and no seq was taken.
    assert (await shared_client.get("/users/u/events")).status_code == 404
    assert (await shared_client.post("/events", json=[])).json()["last_seq"] == 3


async def test_a_list_of_preferences_has_an_outcome_by_row(client: httpx2.AsyncClient) -> None:
    await client.post("/events", json=[{"user": "other", "item": item} for item in "ab"])
    good = {"user": "u", "winner": "a", "loser": "b"}
    rows = [3, good, good | {"loser": "nix"}, good | {"user": "v"}, good | {"loser": "a"}]
    answer = await client.post("/preferences", json=rows)
    assert answer.status_code == 200
    verdict = answer.json()
    assert (verdict["accepted"], verdict["last_seq"]) == (2, 4)
    assert [(bad["index"], bad["code"]) for bad in verdict["rejected"]] == [
        (0, "invalid_preference"),
        (2, "unknown_item"),
        (4, "same_item"),
    ]
    assert (await client.post("/preferences", json=[])).json() == {
        "accepted": 0,
        "rejected": [],
        "last_seq": 4,
    }
    assert (await client.post("/preferences", content=b"{", headers=JSON)).status_code == 400
    too_many = await client.post("/preferences", json=[1] * 10_001)
    assert (too_many.status_code, too_many.json()["code"]) == (413, "too_many_preferences")


async def test_posting_preferences_needs_a_key(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"admin_key": SecretStr("0123456789abcdef")}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        body = {"user": "u", "winner": "a", "loser": "b"}
        assert (await client.post("/preferences", json=body)).status_code == 401
