"""Items that came after the training are the model's own once a few of its users took them up."""

from __future__ import annotations

from collections import Counter

import httpx2
import pytest
from fastapi import FastAPI

from app.recommend.new_items import NewItems
from app.services import Services
from tests.app.models import publish_model
from tests.app.recommend.asking import GENRES, USERS, ask, ids, post, seen_by, serving

pytestmark = pytest.mark.anyio

LEAST = 5


@pytest.fixture
def new_items(filled: Services) -> NewItems:
    return NewItems(filled.events, filled.catalog, LEAST)


async def took(client: httpx2.AsyncClient, item: str, users: list[str], type_: str = "") -> None:
    kind = {"type": type_} if type_ else {}
    body = [{"user": user, "item": item, **kind} for user in users]
    assert (await client.post("/events", json=body)).json()["accepted"] == len(users)


async def source_in_list(client: httpx2.AsyncClient, user: str, item: str) -> str | None:
    """What a place of this item is made from, in a list of everything; None: it has none."""
    answer = await ask(client, user, n=100, exclude_seen=False)
    return next((place["source"] for place in answer["items"] if place["id"] == item), None)


async def test_enough_users_make_an_item_the_models_own(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    host, users = app.state.recommend.host, USERS[:LEAST]
    before = await ask(client, "user-50")
    await took(client, "brand-new", users[:-1])
    await host.grow(new_items)
    assert serving(app).n_items == len(serving(app).item_ids)
    assert "brand-new" not in serving(app).item_ids
    assert await source_in_list(client, "user-50", "brand-new") == "popular"

    await took(client, "brand-new", users[-1:])
    await host.grow(new_items)
    assert serving(app).item_ids[-1] == "brand-new"
    assert await source_in_list(client, "user-50", "brand-new") == "model"
    after = await ask(client, "user-50")
    assert after["model_version"] == before["model_version"] == trained
    others = [item for item in ids(after) if item != "brand-new"]
    assert others == ids(before)[: len(others)]  # all else is where it was

    compared = await post(client, "/compare", user="user-50", items=["brand-new", *ids(before)[:2]])
    assert len(compared["items"]) == 3
    reranked = await post(client, "/rerank", user="user-50", items=["brand-new", ids(before)[0]])
    assert {place["source"] for place in reranked["items"]} == {"model"}
    like = (await client.get("/items/brand-new/similar")).json()
    assert like["model_version"] == trained


async def test_who_took_it_up_is_told_nothing_again_and_their_like_more(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, new_items: NewItems
) -> None:
    """An item that only lovers of one genre took up, and one that those of another did: users see
    that of their own genre first."""
    await publish_model(filled, epochs=15)
    host = app.state.recommend.host
    await host.refresh()

    def share(user: str, genre: str) -> float:
        own = seen_by(user)
        return sum(GENRES[item] == genre for item in own) / len(own)

    total = Counter(GENRES[item] for user in USERS for item in seen_by(user))
    (first, _), (second, _) = total.most_common(2)
    lovers = {
        genre: sorted(USERS, key=lambda user: share(user, other) - share(user, genre))
        for genre, other in ((first, second), (second, first))
    }
    for genre, name in ((first, "new-a"), (second, "new-b")):
        await took(client, name, lovers[genre][:LEAST])
    await host.grow(new_items)
    assert set(serving(app).item_ids[-2:]) == {"new-a", "new-b"}
    right = []
    for own, other, genre in (("new-a", "new-b", first), ("new-b", "new-a", second)):
        for user in lovers[genre][LEAST : LEAST + 5]:
            answer = await post(client, "/compare", user=user, items=[own, other])
            right.append(answer["probability"][0][1])
    assert sum(right) / len(right) > 0.55
    assert "new-a" not in ids(await ask(client, lovers[first][0], n=100))


async def test_dislikes_and_users_without_a_vector_do_not_count(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "unwanted", USERS[:8], "dislike")
    await took(client, "unheard", [f"newcomer-{n}" for n in range(8)])
    model = serving(app)
    await app.state.recommend.host.grow(new_items)
    assert serving(app) is model


async def test_one_user_many_times_is_one(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "again", ["user-1"] * 20)
    model = serving(app)
    await app.state.recommend.host.grow(new_items)
    assert serving(app) is model


async def test_more_users_fit_it_anew_and_a_few_do_not(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    host = app.state.recommend.host
    await took(client, "brand-new", USERS[:6])
    await host.grow(new_items)
    first = serving(app)
    await took(client, "brand-new", USERS[6:8])
    await host.grow(new_items)
    assert serving(app) is first
    await took(client, "brand-new", USERS[8:12])
    await host.grow(new_items)
    second = serving(app)
    assert second.item_ids == first.item_ids
    assert (second.version, second.base) == (first.version, first.base)
    assert second.key != first.key  # no list of before is given out


async def test_what_newer_users_did_counts_for_the_new_item(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    """Somebody whose only event is about the new item gets a list of their own."""
    await took(client, "brand-new", [*USERS[:LEAST], "anna"])
    assert {p["source"] for p in (await ask(client, "anna"))["items"]} == {"popular"}
    await app.state.recommend.host.grow(new_items)
    assert {p["source"] for p in (await ask(client, "anna"))["items"]} == {"fold_in"}


async def test_a_new_version_begins_anew(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    filled: Services,
    new_items: NewItems,
) -> None:
    host = app.state.recommend.host
    await took(client, "brand-new", USERS[:LEAST])
    await host.grow(new_items)
    await publish_model(filled)
    await host.refresh()
    model = serving(app)
    assert (model.revision, "brand-new" in model.item_ids) == ("", True)  # trained on by now
    await host.grow(new_items)
    assert serving(app) is model
    await took(client, "newer", USERS[:LEAST])
    await host.grow(new_items)
    assert serving(app).item_ids[-1] == "newer"


async def test_a_deleted_item_is_not_shown(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "brand-new", USERS[:LEAST])
    assert (await client.delete("/items/brand-new")).status_code in (200, 204)
    await app.state.recommend.host.grow(new_items)
    assert await source_in_list(client, "user-50", "brand-new") is None
