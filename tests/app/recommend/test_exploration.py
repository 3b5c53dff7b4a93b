"""Newcomers' lists: the popular, and in some places others that are draw_list for each user."""

from __future__ import annotations

from collections import Counter

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from app.catalog.snapshot import Catalogue, CatalogueRow
from app.core.settings import Settings
from app.recommend import exploration as module
from app.recommend import popularity
from app.recommend.exploration import Pool, draw_list
from app.wiring import Services
from tests.app.conftest import SMALL
from tests.app.recommend.conftest import GENRES, ITEMS, ask, ids, seen_by, sources

pytestmark = pytest.mark.anyio

COUNTS = Counter(item for _, item, _ in SMALL.interactions)
USERS = [f"nobody-{n}" for n in range(40)]


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    share = getattr(request, "param", 0.3)
    return settings.model_copy(update={"exploration": share})


async def test_each_newcomer_gets_a_list_of_their_own_and_keeps_it(
    client: httpx2.AsyncClient, trained: str
) -> None:
    lists = {user: await ask(client, user) for user in USERS}
    best = [ids(await ask(client, "user-1", n=1000, exclude_seen=False))]
    assert len(best[0]) == len(ITEMS)
    assert len({tuple(ids(answer)) for answer in lists.values()}) > 35
    popular_first = sorted(COUNTS.values(), reverse=True)
    for user, answer in lists.items():
        own = ids(answer)
        assert len(set(own)) == 10
        assert sources(answer) == ["popular"] * 10
        assert [item["rank"] for item in answer["items"]] == list(range(1, 11))
        assert all(i["score"] is i["preferred_over_next"] is None for i in answer["items"])
        assert COUNTS[own[0]] == popular_first[0]  # the first place is never drawn
        # Seven of the ten most popular, in their order; the three others are from beyond.
        top = [item for item in own if COUNTS[item] >= popular_first[9]]
        assert len(top) >= 7
        assert (await ask(client, user))["items"] == answer["items"]
    shown = {item for answer in lists.values() for item in ids(answer)}
    assert len(shown) > 30


@pytest.mark.parametrize("settings", [0.0], indirect=True)
async def test_without_exploration_everyone_gets_the_most_popular(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    lists = [ids(await ask(client, user)) for user in USERS[:5]]
    assert lists == [lists[0]] * 5
    places = [COUNTS[item] for item in lists[0]]
    assert places == sorted(COUNTS.values(), reverse=True)[:10]
    assert app.state.recommend.lists.cache.hits > 0


@pytest.mark.parametrize("settings", [0.1], indirect=True)
async def test_a_list_too_short_for_its_share_is_the_most_popular(
    client: httpx2.AsyncClient, trained: str
) -> None:
    lists = [ids(await ask(client, user, n=9)) for user in USERS[:5]]
    assert lists == [lists[0]] * 5
    assert len({tuple(ids(await ask(client, user, n=10))) for user in USERS}) > 15


async def test_drawn_items_are_filtered_like_all_others(
    client: httpx2.AsyncClient, trained: str
) -> None:
    genre = GENRES[ITEMS[0]]
    for user in USERS[:10]:
        assert {GENRES[item] for item in ids(await ask(client, user, category=genre))} == {genre}
        without = ids(await ask(client, user, exclude=ITEMS[:20], n=20))
        assert not set(without) & set(ITEMS[:20])
        assert ids(await ask(client, user, category="nobody has it")) == []
    await client.patch(f"/items/{ITEMS[30]}", json={"hidden": True})
    await client.delete(f"/items/{ITEMS[31]}")
    shown = {item for user in USERS for item in ids(await ask(client, user, n=20))}
    assert not shown & {ITEMS[30], ITEMS[31]}
    assert len(ids(await ask(client, USERS[0], n=1000))) == len(ITEMS) - 2


async def test_items_that_nobody_has_taken_up_get_their_chance(
    client: httpx2.AsyncClient, trained: str
) -> None:
    await client.post("/items", json=[{"id": f"new-{n}"} for n in range(30)])
    shown = {item for user in USERS for item in ids(await ask(client, user))}
    assert len([item for item in shown if item.startswith("new-")]) > 5


async def test_who_has_events_is_not_explored_with(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    """There is no model: everyone's list is popular, and those of known users are exactly that."""
    answer = ids(await ask(client, "user-1"))
    left = {item: n for item, n in COUNTS.items() if item not in seen_by("user-1")}
    assert [COUNTS[item] for item in answer] == sorted(left.values(), reverse=True)[:10]
    other = ids(await ask(client, USERS[0]))
    assert [COUNTS[item] for item in other] != sorted(COUNTS.values(), reverse=True)[:10]


async def test_lists_follow_the_popularity_and_the_day(
    client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {user: ids(await ask(client, user)) for user in USERS}
    monkeypatch.setattr(popularity, "INCREMENT_SECONDS", 0.0)
    rows = [{"user": f"fan-{n}", "item": "hit"} for n in range(100)]
    await client.post("/events", json=rows)
    for user in USERS:
        assert ids(await ask(client, user))[0] == "hit"
    today = {user: ids(await ask(client, user)) for user in USERS}
    assert today != before
    monkeypatch.setattr(module.time, "time", lambda: 1.9e9)
    later = {user: ids(await ask(client, user)) for user in USERS}
    assert sum(later[user] != today[user] for user in USERS) > 35


def test_how_often_an_item_is_drawn_grows_with_the_root_of_its_users() -> None:
    catalogue = Catalogue().updated(
        [CatalogueRow(n, f"i{n}", None, [], False, False, 1) for n in range(1, 8)]
    )
    popularity = (1, 2, 3), ((b'{"rank":', b"}"),) * 3
    users = np.array([99, 24, 8, 0])
    pool = Pool(*popularity, np.array([4, 5, 6, 7]), np.cumsum(np.sqrt(users + 1.0)).tolist())
    places: Counter[int] = Counter()
    items: Counter[int] = Counter()
    n = 8000
    for user in range(n):
        own = draw_list(pool, 1, str(user), catalogue).ids
        (other,) = set(own) - {1, 2, 3}
        items[other] += 1
        places[own.index(other)] += 1
    for item, share in zip((4, 5, 6, 7), (10 / 19, 5 / 19, 3 / 19, 1 / 19), strict=True):
        assert items[item] / n == pytest.approx(share, abs=0.02)
    assert places.keys() == {1, 2}
    assert places[1] / n == pytest.approx(0.5, abs=0.02)


def test_more_places_than_there_are_others() -> None:
    catalogue = Catalogue().updated(
        [CatalogueRow(n, f"i{n}", None, [], False, False, 1) for n in range(1, 8)]
    )
    popularity = (1, 2, 3, 4, 5), ((b'{"rank":', b"}"),) * 5
    # One of them weighs a million times as much: the other is draw_list all the same.
    pool = Pool(*popularity, np.array([6, 7]), [1e6, 1e6 + 1.0])
    for seed in range(20):
        own = draw_list(pool, 4, str(seed), catalogue).ids
        assert len(own) == 5
        assert {6, 7} < set(own)
        assert own[0] == 1
    empty = Pool(*popularity, np.zeros(0, np.int64), [])
    assert draw_list(empty, 4, "u", catalogue).ids == (1, 2, 3, 4, 5)
    assert draw_list(Pool((), (), np.zeros(0, np.int64), []), 4, "u", catalogue).ids == ()
