"""Many users in one request: each gets what they would get alone, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.errors import Unavailable
from app.recommend import batch as module
from app.wiring import Services
from tests.app.conftest import publish_model
from tests.app.recommend.conftest import ITEMS, USERS, ask, ids, post, refused, seen_by, sources

pytestmark = pytest.mark.anyio


async def test_each_gets_what_they_would_get_alone(
    client: httpx2.AsyncClient, trained: str
) -> None:
    await client.post("/events", json=[{"user": "fresh", "item": i} for i in seen_by("user-2")[:4]])
    users = ["user-1", "nobody", "user-2", "fresh", "user-1", "a/ 🙂"]
    options = {"n": 7, "exclude_seen": False, "exclude": ITEMS[:2]}
    answer = await post(client, "/recommend/batch", users=users, **options)
    assert [result["user"] for result in answer["results"]] == users
    for user, result in zip(users, answer["results"], strict=True):
        alone = await ask(client, user, **options)
        assert result["status"] == 200
        assert result["items"] == alone["items"]
        assert result["model_version"] == trained
        assert result["as_of_seq"] == alone["as_of_seq"]
    assert {sources(result)[0] for result in answer["results"]} == {"model", "popular", "fold_in"}
    assert len({result["recommendation_id"] for result in answer["results"]}) == len(users)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"category": ["Drama", "Comedy"], "n": 50},
        {"category": ["nobody has it"]},
        {"diversity": 0.6},
        {"explain": "pairwise"},
        {"min_seq": 1},
    ],
    ids=str,
)
async def test_the_options_are_those_of_a_single_list(
    client: httpx2.AsyncClient, trained: str, options: dict[str, Any]
) -> None:
    answer = await post(client, "/recommend/batch", users=["user-3"], **options)
    assert answer["results"][0]["items"] == (await ask(client, "user-3", **options))["items"]


async def test_users_whose_lists_have_to_be_ranked_share_passes(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    size = app.state.inference_metrics.batch_size
    answer = await post(client, "/recommend/batch", users=USERS)
    assert [result["status"] for result in answer["results"]] == [200] * len(USERS)
    assert size._sum.get() == len(USERS)
    app.state.recommend.lists.cache.clear()
    before = _passes(app)
    await post(client, "/recommend/batch", users=USERS)  # now that candidates are at hand
    assert _passes(app) - before <= len(USERS) / module.MAX_CONCURRENT_USERS + 3


def _passes(app: FastAPI) -> float:
    buckets = app.state.inference_metrics.batch_size._buckets
    return sum(bucket.get() for bucket in buckets)


async def test_what_is_wrong_with_one_is_said_in_its_place(
    client: httpx2.AsyncClient, trained: str
) -> None:
    answer = await post(client, "/recommend/batch", users=["", "user-1", "x" * 257, "a\0b"])
    results = answer["results"]
    assert [result["status"] for result in results] == [422, 200, 422, 422]
    assert {results[at]["code"] for at in (0, 2, 3)} == {"invalid_id"}
    assert results[2]["detail"] == "the user's id is longer than 256 bytes of UTF-8"
    late = await post(client, "/recommend/batch", users=["user-1"], min_seq=10**6)
    assert (late["results"][0]["status"], late["results"][0]["code"]) == (409, "seq_not_reached")
    assert (await post(client, "/recommend/batch", users=[]))["results"] == []


async def test_what_is_wrong_with_all_is_said_once(
    client: httpx2.AsyncClient, trained: str
) -> None:
    path = "/recommend/batch"
    many = [f"u{n}" for n in range(1001)]
    assert await refused(client, path, users=many) == (413, "too_many_users")
    assert await refused(client, path, users=many[:101], n=1000) == (413, "too_many_items")
    assert await refused(client, path, users=["u"], exclude=many) == (413, "too_many_exclude")
    assert len((await post(client, path, users=many[:1000], n=1))["results"]) == 1000
    assert await refused(client, path, users=["u"], model="nope") == (404, "unknown_model")
    for body in (
        {},
        {"users": "u"},
        {"users": [1]},
        {"users": ["u"], "n": 0},
        {"users": ["u"], "n": "5"},
        {"users": ["u"], "n": 1.5},
        {"users": ["u"], "exclude_seen": 1},
        {"users": ["u"], "exclude": [""]},
        {"users": ["u"], "category": ["c"] * 65},
        {"users": ["u"], "diversity": 1.1},
        {"users": ["u"], "explain": "all"},
        {"users": ["u"], "user": "u"},
    ):
        assert (await refused(client, path, **body)) == (422, "invalid_request"), body
    assert len((await post(client, path, users=["u"], n=5.0))["results"][0]["items"]) == 5


async def test_the_user_named_batch_has_a_list(client: httpx2.AsyncClient, trained: str) -> None:
    assert (await ask(client, "batch"))["user"] == "batch"


async def test_a_batch_under_way_leaves_places_for_others(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow passes: a single request is ranked in the next one or two, not after the whole batch."""
    monkeypatch.setattr(module, "MAX_CONCURRENT_USERS", 4)
    app.state.recommend.batch._slots = asyncio.Semaphore(4)
    await post(client, "/recommend/batch", users=USERS)
    app.state.recommend.lists.cache.clear()
    model = app.state.recommend.models.current
    honest, passes = model.engine.rank, 0
    begun, go, waiting = Event(), Event(), asyncio.Event()

    def held(requests: Any) -> Any:
        nonlocal passes
        passes += 1
        begun.set()
        assert go.wait(60)
        return honest(requests)

    monkeypatch.setattr(model.engine, "rank", held)
    batcher = app.state.recommend.batcher
    queue = batcher.rank

    async def queued(model: Any, request: Any, *args: Any, ready: bool) -> Any:
        if request.user.key[0] == "user-1":
            waiting.set()  # and nothing else comes to its turn before it is in the queue
        return await queue(model, request, *args, ready=ready)

    monkeypatch.setattr(batcher, "rank", queued)
    users = [user for user in USERS if user != "user-1"]
    batch = asyncio.create_task(post(client, "/recommend/batch", users=users))
    await asyncio.to_thread(begun.wait, 60)
    single = asyncio.create_task(ask(client, "user-1"))
    await asyncio.wait_for(waiting.wait(), 60)
    assert passes == 1
    go.set()
    assert ids(await single)
    assert passes <= 3
    assert len((await batch)["results"]) == len(users)
    assert passes >= len(users) / 5


async def test_a_batch_waits_where_a_single_request_is_refused(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = app.state.recommend.service
    honest, calls = service.recommend, 0

    async def overloaded_at_first(*args: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise Unavailable("too many", code="overloaded")
        found: bytes = await honest(*args)
        return found

    monkeypatch.setattr(service, "recommend", overloaded_at_first)
    assert (await post(client, "/recommend/batch", users=["user-1"]))["results"][0]["items"]
    calls = -(10**9)
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.0)
    result = (await post(client, "/recommend/batch", users=["user-1"]))["results"][0]
    assert (result["status"], result["code"]) == (503, "overloaded")


@pytest.mark.slow
async def test_the_bytes_of_an_answer_are_bounded(
    client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items may be shown with attributes: a thousand lists of them could fill the memory."""
    item = {"id": ITEMS[0], "title": "t", "attributes": {"text": "x" * 2_000}}
    assert (await client.put(f"/items/{ITEMS[0]}", json=item)).status_code == 200
    wanted = {"users": USERS[:20], "exclude_seen": False, "n": 50, "include": ["attributes"]}
    whole = await client.post("/recommend/batch", json=wanted)
    assert whole.status_code == 200
    monkeypatch.setattr(module, "MAX_BYTES", len(whole.content) + 1_000)
    assert (await client.post("/recommend/batch", json=wanted)).status_code == 200
    monkeypatch.setattr(module, "MAX_BYTES", len(whole.content) - 1_000)
    for _ in range(module.MAX_BATCHES + 1):  # none of them keeps a place
        assert await refused(client, "/recommend/batch", **wanted) == (413, "too_many_items")
    # Without the attributes it is small, and every user's place is free again.
    del wanted["include"]
    assert (await client.post("/recommend/batch", json=wanted)).status_code == 200


async def test_too_many_batches_at_once_are_refused(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.state.recommend.batch._batches, "limit", 1)
    service, begun, go = app.state.recommend.service, asyncio.Event(), asyncio.Event()
    honest = service.recommend

    async def slow(*args: Any) -> bytes:
        begun.set()
        await go.wait()
        found: bytes = await honest(*args)
        return found

    monkeypatch.setattr(service, "recommend", slow)
    first = asyncio.create_task(post(client, "/recommend/batch", users=["user-1"]))
    await asyncio.wait_for(begun.wait(), 30)
    second = client.post("/recommend/batch", json={"users": ["user-2"]})
    response = await asyncio.wait_for(second, 30)
    assert (response.status_code, response.json()["code"]) == (503, "overloaded")
    assert response.headers["Retry-After"] == "2"
    go.set()
    assert (await first)["results"][0]["status"] == 200
    assert (await post(client, "/recommend/batch", users=["user-2"]))["results"]


async def test_a_version_is_the_same_for_all_of_a_batch(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, filled: Services
) -> None:
    other = await publish_model(filled, seed=9)
    await app.state.recommend.models.refresh()
    answer = await post(client, "/recommend/batch", users=["user-1", "user-2"], model=trained)
    assert {result["model_version"] for result in answer["results"]} == {trained}
    answer = await post(client, "/recommend/batch", users=["user-1", "user-2"])
    assert {result["model_version"] for result in answer["results"]} == {other}
