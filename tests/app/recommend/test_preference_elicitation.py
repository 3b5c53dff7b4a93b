"""`GET /users/{id}/questions`. On both databases."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.inference.new_items import NewItems
from ncr_core.explain.elicitation import QuestionPool
from tests.app.conftest import SMALL, add_small_data, publish_model

pytestmark = pytest.mark.anyio


async def ask(client: httpx2.AsyncClient, user: str, n: int | None = None) -> Any:
    answer = await client.get(f"/users/{user}/questions", params={} if n is None else {"n": n})
    assert answer.status_code == 200
    return answer.json()


async def with_model(app: FastAPI) -> str:
    await add_small_data(app.state.services)
    version = await publish_model(app.state.services)
    await app.state.recommend.models.refresh()
    return version


def pairs_in(found: Any) -> list[frozenset[str]]:
    return [frozenset((q["a"]["id"], q["b"]["id"])) for q in found["items"]]


async def state(client: httpx2.AsyncClient, user: str, question: Any) -> None:
    body = {"user": user, "winner": question["a"]["id"], "loser": question["b"]["id"]}
    assert (await client.post("/preferences", json=body)).status_code == 201


async def test_a_newcomer_is_asked_about_popular_items(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    version = await with_model(app)
    found = await ask(client, "nobody", 6)
    assert (found["user"], found["model_version"]) == ("nobody", version)
    assert (found["source"], found["reason"]) == ("model", None)
    assert len(found["items"]) == 6
    assert len(frozenset().union(*pairs_in(found))) == 12  # no item twice
    information = [question["information"] for question in found["items"]]
    assert all(0 <= bits <= 1 for bits in information)
    assert information[0] > 0
    titles = {item.id: item.title for item in SMALL.items}
    for question in found["items"]:
        for side in ("a", "b"):
            assert question[side]["title"] == titles[question[side]["id"]]
    assert await ask(client, "nobody", 6) == found
    assert len((await ask(client, "nobody"))["items"]) == 5


async def test_what_was_stated_and_seen_is_not_asked_about(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await with_model(app)
    asked = set()
    for _ in range(4):
        found = await ask(client, "new", 2)
        assert not asked & set(pairs_in(found))
        asked |= set(pairs_in(found))
        for question in found["items"]:
            await state(client, "new", question)
    assert found["as_of_seq"] == len(SMALL.interactions) + 6
    user, seen = "user-1", {item for user, item, _ in SMALL.interactions if user == "user-1"}
    assert not seen & frozenset().union(*pairs_in(await ask(client, user, 20)))
    hidden = (await ask(client, "new", 1))["items"][0]["a"]["id"]
    await client.patch(f"/items/{hidden}", json={"hidden": True})
    assert hidden not in frozenset().union(*pairs_in(await ask(client, "new", 50)))


async def test_what_is_known_changes_what_is_asked(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the questions to the same users, of whom the same is asked already, by the tastes of
    everybody alike."""
    await with_model(app)
    users = [f"user-{n}" for n in range(1, 30)]
    known = [pairs_in(await ask(client, user, 3)) for user in users]
    assert [pairs_in(await ask(client, user, 3)) for user in users] == known

    as_for_anybody = QuestionPool.plausible
    monkeypatch.setattr(QuestionPool, "plausible", lambda pool, *known: as_for_anybody(pool))
    unknown = [pairs_in(await ask(client, user, 3)) for user in users]
    assert sum(a != b for a, b in zip(known, unknown, strict=True)) > 10


async def test_one_who_has_seen_everything_is_told_so(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await with_model(app)
    every = [item.id for item in SMALL.items]
    await client.post("/events", json=[{"user": "all", "item": item} for item in every])
    found = await ask(client, "all")
    assert (found["items"], found["reason"]) == ([], "seen_everything")
    few = [{"user": "few", "item": item} for item in every[2:]]
    await client.post("/events", json=few)
    found = await ask(client, "few", 10)
    assert (pairs_in(found), found["reason"]) == ([frozenset(every[:2])], None)
    await state(client, "few", found["items"][0])
    found = await ask(client, "few", 10)
    assert (found["items"], found["reason"]) == ([], "asked_everything")


async def test_one_who_has_seen_what_is_popular_is_asked_about_the_rest(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.recommend import preference_elicitation

    monkeypatch.setattr(preference_elicitation, "POOL_ITEMS", 10)
    await with_model(app)
    newcomer = frozenset().union(*pairs_in(await ask(client, "x", 50)))
    assert len(newcomer) > 10  # the pool's 45 pairs are not enough
    pool = frozenset().union(*pairs_in(await ask(client, "x", 5)))
    assert len(pool) == 10
    counts = Counter(item for _, item, _ in SMALL.interactions)
    assert min(counts[i] for i in pool) >= max(n for i, n in counts.items() if i not in pool)
    await client.post("/events", json=[{"user": "fan", "item": item} for item in pool])
    found = await ask(client, "fan", 5)
    assert (len(found["items"]), found["source"]) == (5, "model")
    assert not pool & frozenset().union(*pairs_in(found))


async def test_without_a_model_popular_items_are_paired(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    rows = [(user, item) for item in range(8) for user in range(9 - item)]
    await client.post("/events", json=[{"user": f"u{u}", "item": f"i{i}"} for u, i in rows])
    found = await ask(client, "anyone", 2)
    assert (found["source"], found["model_version"], found["reason"]) == ("popular", None, None)
    assert pairs_in(found) == [frozenset(("i0", "i1")), frozenset(("i2", "i3"))]
    assert found["items"][0]["information"] is None
    await state(client, "anyone", found["items"][0])
    assert pairs_in(await ask(client, "anyone", 2)) == [
        frozenset(("i0", "i2")),
        frozenset(("i1", "i3")),
    ]
    # What nobody took up comes after all that somebody did.
    await client.post("/items", json=[{"id": "fresh", "title": "Fresh"}])
    every = pairs_in(await ask(client, "u0", 50))
    assert every == []
    assert (await ask(client, "u0"))["reason"] == "seen_everything"
    assert frozenset(("i7", "fresh")) in pairs_in(await ask(client, "u2", 50))


async def test_of_an_empty_catalogue_there_is_nothing_to_ask(client: httpx2.AsyncClient) -> None:
    found = await ask(client, "anyone")
    assert (found["items"], found["reason"], found["source"]) == ([], "too_few_items", "popular")


async def test_more_questions_at_a_time_than_are_chosen_are_refused(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    places = app.state.recommend.questions._slots
    with places.one():
        places.limit = 1
        answer = await client.get("/users/u/questions")
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    assert (await client.get("/users/u/questions")).status_code == 200


async def test_new_items_are_asked_about_by_what_they_are(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    """Also when their rows in the model are others than they were."""
    version = await with_model(app)
    host, services = app.state.recommend.models, app.state.services
    users = [f"user-{n}" for n in range(1, 41)]
    pools = []
    for item, n in (("late", 30), ("later", 40)):
        rows = [{"user": user, "item": item} for user in users[:n]]
        await client.post("/events", json=rows)
        await host.add_new_items(NewItems(services.events, services.catalog, 5))
        await ask(client, "new", 5)
        kept = app.state.recommend.questions._pool
        assert kept.model.key == host.current.key
        pools.append({host.current.item_ids[row] for row in kept.pool.items})
    assert host.current.version == version
    assert "late" in pools[0]
    assert pools[1] >= {"late", "later"}


async def test_after_a_new_version_it_is_asked_by_that(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await with_model(app)
    before = await ask(client, "nobody", 3)
    version = await publish_model(app.state.services, seed=9)
    await app.state.recommend.models.refresh()
    after = await ask(client, "nobody", 3)
    assert after["model_version"] == version
    assert [q["information"] for q in after["items"]] != [q["information"] for q in before["items"]]


@pytest.mark.parametrize("n", ["0", "51", "-1", "many", "1.5"])
async def test_bad_numbers(shared_client: httpx2.AsyncClient, n: str) -> None:
    answer = await shared_client.get("/users/u/questions", params={"n": n})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
