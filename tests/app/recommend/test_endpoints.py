"""Lists for everyone: known, new and in between; filtered, and never what was seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.catalog.snapshot import Catalogue
from app.core.settings import Settings
from app.inference import loaded_model
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import SMALL, client_of, publish_model, refresh, until
from tests.app.recommend.conftest import (
    GENRES,
    ITEMS,
    ask,
    ids,
    post,
    refused,
    seen_by,
    sources,
)

pytestmark = pytest.mark.anyio


async def test_an_empty_service_answers_with_an_empty_list(client: httpx2.AsyncClient) -> None:
    answer = await ask(client, "anyone")
    assert answer["items"] == []
    assert answer["model_version"] is None
    assert answer["as_of_seq"] == 0


async def test_without_a_model_everyone_gets_the_popular(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    answer = await ask(client, "new/ 🙂 %", n=5)
    assert answer["user"] == "new/ 🙂 %"
    assert set(sources(answer)) == {"popular"}
    counts = Counter(item for _, item, _ in SMALL.interactions)
    places = [counts[item] for item in ids(answer)]
    assert places == sorted(counts.values(), reverse=True)[:5]
    assert all(i["score"] is i["preferred_over_next"] is None for i in answer["items"])
    assert not set(ids(await ask(client, "user-1", n=50))) & set(seen_by("user-1"))


async def test_new_events_move_the_popularity_list(
    client: httpx2.AsyncClient, filled: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.recommend import popularity

    monkeypatch.setattr(popularity, "INCREMENT_SECONDS", 0.0)
    await ask(client, "new")
    events = [{"user": f"fan-{n}", "item": "hit"} for n in range(80)]
    assert (await client.post("/events", json=events)).json()["accepted"] == 80
    assert ids(await ask(client, "new"))[0] == "hit"


async def test_a_known_user_gets_the_models_list(client: httpx2.AsyncClient, trained: str) -> None:
    answer = await ask(client, "user-1")
    assert answer["model_version"] == trained
    assert answer["recommendation_id"].startswith(trained)
    assert answer["as_of_seq"] == len(SMALL.interactions)
    assert len(set(ids(answer))) == 10
    assert set(sources(answer)) == {"model"}
    assert [item["rank"] for item in answer["items"]] == list(range(1, 11))
    scores = [item["score"] for item in answer["items"]]
    assert all(0 < score < 1 for score in scores)
    assert scores == sorted(scores, reverse=True)  # this model is additive
    ahead = [item["preferred_over_next"] for item in answer["items"]]
    assert all(0.5 <= p < 1 for p in ahead[:-1])
    assert ahead[-1] is None
    assert not set(ids(answer)) & set(seen_by("user-1"))
    assert ids(answer) != ids(await ask(client, "user-2"))
    assert ids(await ask(client, "user-1")) == ids(answer)


async def test_an_unknown_user_of_a_trained_service_gets_the_popular(
    client: httpx2.AsyncClient, trained: str
) -> None:
    answer = await ask(client, "nobody")
    assert set(sources(answer)) == {"popular"}
    assert answer["model_version"] == trained


async def test_events_after_training_change_list_and_source(
    client: httpx2.AsyncClient, trained: str
) -> None:
    before = ids(await ask(client, "user-1"))
    events = [{"user": "user-1", "item": item} for item in before[:3]]
    events += [{"user": "newcomer", "item": item} for item in seen_by("user-2")[:5]]
    seq = (await client.post("/events", json=events)).json()["last_seq"]

    known = await ask(client, "user-1", min_seq=seq)
    assert known["as_of_seq"] >= seq
    assert set(sources(known)) == {"fold_in"}
    assert not set(ids(known)) & {*before[:3], *seen_by("user-1")}
    new = await ask(client, "newcomer")
    assert set(sources(new)) == {"fold_in"}
    assert not set(ids(new)) & set(seen_by("user-2")[:5])
    assert ids(await ask(client, "newcomer")) == ids(new)


async def test_folding_in_follows_the_users_own_events(
    client: httpx2.AsyncClient, trained: str
) -> None:
    async def taste(user: str, items: list[str]) -> list[str]:
        await client.post("/events", json=[{"user": user, "item": item} for item in items])
        answer = await ask(client, user, exclude_seen=False, n=20)
        return ids(answer)

    one = await taste("new-1", seen_by("user-1")[:6])
    two = await taste("new-2", seen_by("user-2")[:6])
    assert one != two
    # The same user, some events later: another order, not only other exclusions.
    assert await taste("new-1", seen_by("user-2")[:6]) != one


async def test_someone_who_was_erased_comes_back_as_new(
    client: httpx2.AsyncClient, trained: str
) -> None:
    assert (await client.delete("/users/user-1")).status_code == 204
    assert set(sources(await ask(client, "user-1"))) == {"popular"}
    for user in ("user-1", "really-new"):
        await client.post("/events", json={"user": user, "item": seen_by("user-2")[0]})
    back, new = await ask(client, "user-1"), await ask(client, "really-new")
    assert set(sources(back)) == {"fold_in"}
    assert ids(back) == ids(new)
    assert [i["score"] for i in back["items"]] == pytest.approx([i["score"] for i in new["items"]])


async def test_asking_for_a_version(client: httpx2.AsyncClient, app: FastAPI, trained: str) -> None:
    assert ids(await ask(client, "user-1", model=trained))
    unknown = await client.get("/recommend/user-1", params={"model": "nope"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_model")


async def test_the_popularity_list_counts_an_event_once(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.recommend import popularity

    monkeypatch.setattr(popularity, "INCREMENT_SECONDS", 0.0)
    services: Services = app.state.services
    counted = popularity.PopularityRanking(services.events)
    await counted.ranked(0)
    for n in range(4):
        await services.events.add_rows([{"user": f"u{n}", "item": "i"}], 0)
        # An answer that began before the last event asks for what it knows of.
        await counted.ranked(max(0, await services.events.last_seq() - 1))
        await counted.ranked(await services.events.last_seq())
    assert counted.counts.max() == 4


async def test_a_user_of_unknown_items_only_gets_the_popular(
    client: httpx2.AsyncClient, trained: str
) -> None:
    await client.post("/events", json={"user": "early", "item": "brand new"})
    assert set(sources(await ask(client, "early"))) == {"popular"}


async def test_filters(client: httpx2.AsyncClient, trained: str) -> None:
    genre = GENRES[ids(await ask(client, "user-1"))[0]]
    other = next(g for g in GENRES.values() if g != genre)
    one = await ask(client, "user-1", category=genre, n=50)
    assert {GENRES[i] for i in ids(one)} == {genre}
    both = await ask(client, "user-1", category=[genre, other], n=50)
    assert {GENRES[i] for i in ids(both)} == {genre, other}
    assert ids(await ask(client, "user-1", category="no such")) == []

    top = ids(await ask(client, "user-1"))
    without = ids(await ask(client, "user-1", exclude=[top[0], top[3], "unknown"]))
    assert without[:8] == [i for i in top if i not in (top[0], top[3])]
    await client.patch(f"/items/{top[1]}", json={"hidden": True})
    await client.delete(f"/items/{top[2]}")
    assert not {top[1], top[2]} & set(ids(await ask(client, "user-1", n=50)))


async def test_seen_items_on_request(client: httpx2.AsyncClient, trained: str) -> None:
    everything = ids(await ask(client, "user-1", n=1000, exclude_seen=False))
    assert set(everything) >= set(seen_by("user-1"))
    assert len(everything) == len(set(everything)) == len(SMALL.items)


async def test_items_that_the_model_does_not_know_fill_up_at_the_end(
    client: httpx2.AsyncClient, trained: str
) -> None:
    await client.put("/items/late", json={"title": "Came late"})
    answer = await ask(client, "user-1", n=100)
    assert answer["items"][-1] == {
        "id": "late",
        "title": "Came late",
        "rank": len(answer["items"]),
        "score": None,
        "source": "popular",
        "preferred_over_next": None,
    }
    # Beside it, items that nobody had when the model was trained.
    used = {item for _, item, _ in SMALL.interactions}
    assert {i["source"] for i in answer["items"] if i["id"] in used} == {"model"}


@pytest.mark.parametrize("n", ["0", "-1", "10000", "ten", ""])
async def test_n_outside_its_bounds(shared_client: httpx2.AsyncClient, n: str) -> None:
    response = await shared_client.get("/recommend/u", params={"n": n})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert "query.n" in response.json()["detail"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/recommend/" + "x" * 10_000, "invalid_id"),
        ("/recommend/%ff", "invalid_id"),
        ("/recommend/u?exclude=", "invalid_id"),
        ("/recommend/u?explain=why", "invalid_request"),
        ("/recommend/u?min_seq=-1", "invalid_request"),
        (f"/recommend/u?min_seq={2**53}", "invalid_request"),
        ("/recommend/u?diversity=1.5", "invalid_request"),
        ("/recommend/u?diversity=-0.1", "invalid_request"),
        ("/recommend/u?diversity=nan", "invalid_request"),
    ],
)
async def test_other_bad_input(shared_client: httpx2.AsyncClient, path: str, code: str) -> None:
    response = await shared_client.get(path)
    assert response.status_code == 422
    assert response.json()["code"] == code


async def test_a_seq_that_is_not_reached_is_a_conflict(client: httpx2.AsyncClient) -> None:
    response = await client.get("/recommend/u", params={"min_seq": 2**53 - 1})
    assert response.status_code == 409
    assert response.json()["code"] == "seq_not_reached"


async def test_a_query_that_was_checked_before_gets_the_same(
    client: httpx2.AsyncClient, trained: str
) -> None:
    """The second request with a query takes a shorter way: with the same answers and errors."""
    some = ids(await ask(client, "user-1", n=3))
    for params in ({}, {"n": 3}, {"exclude": some}, {"category": "none"}, {"min_seq": 1}):
        first = await ask(client, "user-1", **params)
        again = await ask(client, "user-1", **params)
        assert again["items"] == first["items"]
        assert again["recommendation_id"] != first["recommendation_id"]
        assert ids(await ask(client, "user-2", **params)) != ids(first) or not ids(first)
    for _ in range(2):
        assert (await client.get("/recommend/user-1?n=0")).status_code == 422
        assert (await client.get("/recommend/user-1?min_seq=99999")).status_code == 409
        assert (await client.get("/recommend/%zz?n=3")).status_code == 422
        assert (await client.get("/recommend/?n=3")).status_code == 404
        assert (await client.post("/recommend/user-1?n=3")).status_code == 405
    assert (await client.get("/recommend/%zz")).json()["code"] == "invalid_id"


async def test_lists_are_kept_until_what_they_depend_on_changes(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    lists = app.state.recommend.lists.cache
    first = await ask(client, "user-1")
    assert lists.hits == 0
    assert (await ask(client, "user-1"))["items"] == first["items"]
    assert lists.hits == 1
    await ask(client, "user-1", n=11)
    assert lists.hits == 1
    # Another user's event leaves it; a title, a hidden item and the user's own event do not.
    await client.post("/events", json={"user": "user-2", "item": ids(first)[0]})
    assert (await ask(client, "user-1"))["as_of_seq"] == first["as_of_seq"] + 1
    assert lists.hits == 2
    # An attribute and an item that the model does not have leave it, too.
    top = ids(first)[0]
    await client.patch(f"/items/{top}", json={"attributes": {"price": 1}})
    await client.put("/items/fresh", json={"title": "Fresh"})
    assert (await ask(client, "user-1"))["items"] == first["items"]
    assert lists.hits == 3
    await client.patch(f"/items/{top}", json={"title": "New"})
    assert (await ask(client, "user-1"))["items"][0]["title"] == "New"
    await client.patch(f"/items/{top}", json={"hidden": True})
    assert top not in ids(await ask(client, "user-1"))
    await client.patch(f"/items/{top}", json={"hidden": False})
    assert ids(await ask(client, "user-1")) == ids(first)
    await client.post("/events", json={"user": "user-1", "item": top})
    assert top not in ids(await ask(client, "user-1"))


async def test_a_request_indexes_its_state_of_the_catalogue_once(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed: list[int] = []
    honest, rank = loaded_model.index_items, app.state.recommend.batcher.rank

    def index_items(catalogue: Catalogue, *args: Any) -> Any:
        indexed.append(catalogue.seq)
        return honest(catalogue, *args)

    async def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(app.state.recommend.batcher, "rank", rank)
        await client.put("/items/new", json={})
        await ask(client, "user-2")
        return await rank(*args, **kwargs)

    monkeypatch.setattr(loaded_model, "index_items", index_items)
    monkeypatch.setattr(app.state.recommend.batcher, "rank", late)
    assert len(ids(await ask(client, "user-1"))) == 10
    assert indexed == sorted(set(indexed))  # not again after the other request's, which is later
    assert len(indexed) == 2


async def test_many_who_ask_for_the_same_list_are_ranked_for_once(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    answers = await asyncio.gather(*(ask(client, "user-3") for _ in range(20)))
    assert all(answer["items"] == answers[0]["items"] for answer in answers)
    assert app.state.inference_metrics.batch_size._sum.get() == 1


@dataclass
class Held:
    """A server whose lists wait for ``go``; long ones count as slow."""

    app: FastAPI
    client: httpx2.AsyncClient
    go: asyncio.Event
    entered: list[int]
    """The n of each list that waits, or has waited."""

    async def asked(self, user: str, n: int, waiting: int) -> asyncio.Task[dict[str, Any]]:
        """A request, when so many lists have begun to wait."""
        task = asyncio.create_task(ask(self.client, user, n=n))
        await until(lambda: len(self.entered) == waiting)
        return task


@asynccontextmanager
async def holding(
    settings: Settings, filled: Services, max_concurrency: int
) -> AsyncIterator[Held]:
    app = create_app(settings.model_copy(update={"max_concurrency": max_concurrency}))
    async with app.router.lifespan_context(app):
        await publish_model(filled, epochs=1)
        await refresh(app)
        batcher, go, entered = app.state.recommend.batcher, asyncio.Event(), []
        rank = batcher.rank

        async def slow(model: Any, request: Any, gone: Any, on_slow: Any, *, ready: bool) -> Any:
            if request.n > 50:
                on_slow()
            entered.append(request.n)
            await go.wait()
            return await rank(model, request, gone, on_slow, ready=ready)

        batcher.rank = slow
        async with client_of(app) as client:
            yield Held(app, client, go, entered)


@pytest.mark.slow
async def test_beyond_the_limit_is_503_and_cheap(settings: Settings, filled: Services) -> None:
    async with holding(settings, filled, max_concurrency=2) as held:
        client = held.client
        first = []
        for n in (60, 10):  # the long lists hold no place while they wait
            for user in ("user-1", "user-2"):
                first.append(await held.asked(user, n, len(first) + 1))
        async with asyncio.timeout(5):
            refused = await client.get("/recommend/user-3")
        assert refused.status_code == 503
        assert refused.json()["code"] == "overloaded"
        assert refused.json()["request_id"] == refused.headers["x-request-id"]
        assert refused.headers["Retry-After"] == "1"
        assert (await client.get("/items?n=1")).status_code == 200
        held.go.set()
        await asyncio.gather(*first)
        assert (await ask(client, "user-3"))["items"]
        assert held.app.state.inference_metrics.refused._value.get() == 1


async def test_who_joins_a_slow_list_holds_no_place_either(
    settings: Settings, filled: Services
) -> None:
    async with holding(settings, filled, max_concurrency=1) as held:
        waiting = [await held.asked("user-1", 60, 1), await held.asked("user-1", 60, 1)]
        (flight,) = held.app.state.recommend.lists._flights._flights.values()
        await until(lambda: flight.waiting == 2)
        waiting.append(await held.asked("user-2", 10, 2))
        held.go.set()
        await asyncio.gather(*waiting)
        assert held.entered == [60, 10]


async def test_pages_and_long_lists_of_baskets_hold_no_place_while_they_wait(
    settings: Settings, filled: Services
) -> None:
    async with holding(settings, filled, max_concurrency=1) as held:
        client, basket = held.client, {"items": [ITEMS[0], ITEMS[7]]}
        held.go.set()
        cursor = (await ask(client, "user-1", n=5))["next_cursor"]
        of_basket = (await post(client, "/recommend", **basket, n=5))["next_cursor"]
        held.go.clear()
        held.entered.clear()
        waiting: list[asyncio.Task[dict[str, Any]]] = []
        for asked in (
            ask(client, "user-1", n=5, cursor=cursor),
            post(client, "/recommend", **basket, n=5, cursor=of_basket),
            post(client, "/recommend", **basket, n=60),
            ask(client, "user-2"),  # the one place is still there
        ):
            waiting.append(asyncio.create_task(asked))
            await until(lambda: len(held.entered) == len(waiting))
        # A short list holds it; of a basket, too.
        assert await refused(client, "/recommend", **basket) == (503, "overloaded")
        held.go.set()
        answers = await asyncio.gather(*waiting)
        assert [len(answer["items"]) for answer in answers] == [5, 5, len(answers[2]["items"]), 10]


async def test_what_is_asked_for_counts_for_the_size_of_what_is_kept(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    feature = app.state.recommend
    lists, candidates = feature.lists.cache, feature.models.current.candidate_cache
    await ask(client, "user-1", n=1)
    before = lists.size
    await ask(client, "user-1", n=1, category=["x" * 5_000, "y" * 5_000])
    assert lists.size - before > 4 * 10_000
    assert candidates.size > 4 * 10_000


async def test_metrics_tell_what_the_ranker_did(client: httpx2.AsyncClient, trained: str) -> None:
    for _ in range(3):
        await ask(client, "user-1")
    text = (await client.get("/metrics")).text
    assert "ncr_rank_batch_size_sum 1.0" in text
    assert 'ncr_cache_requests_total{cache="lists",result="hit",tier="process"} 2.0' in text
    assert "user-1" not in text
