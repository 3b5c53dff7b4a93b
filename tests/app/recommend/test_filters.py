"""Lists with a filter: just the items that fit, in the order of the whole list, at once."""

from __future__ import annotations

import gc
import json
import random
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.catalog.filters import AttributeFilter
from app.wiring import Services
from tests.app.conftest import publish_model
from tests.app.recommend.conftest import (
    ITEMS,
    USERS,
    ask,
    ids,
    post,
    refused,
    seen_by,
    serving,
    sources,
)
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ATTRIBUTES: dict[str, dict[str, Any]] = {
    item: {
        "price": number,
        "brand": "abc"[number % 3],
        "in_stock": number % 2 == 0,
        "tags": ["all", f"t{number % 5}"],
    }
    for number, item in enumerate(ITEMS)
}


@pytest.fixture
async def described(app: FastAPI, filled: Services) -> Services:
    """With attributes."""
    rows = [{"id": item, "title": item, "attributes": a} for item, a in ATTRIBUTES.items()]
    assert (await filled.catalog.upsert_rows(rows))[0] == len(rows)
    return filled


@pytest.fixture
async def served(app: FastAPI, described: Services) -> str:
    """With a model with a tower."""
    version = await publish_model(described, model="neupr", epochs=2, pretrain=False)
    await app.state.recommend.models.refresh()
    return version


async def filtered(client: httpx2.AsyncClient, user: str, wanted: Any, **more: Any) -> list[str]:
    return ids(await ask(client, user, filter=json.dumps(wanted), **more))


async def test_a_list_has_the_items_that_fit_in_the_order_of_the_whole_list(
    client: httpx2.AsyncClient, described: Services, app: FastAPI
) -> None:
    await publish_model(described, epochs=5)
    await app.state.recommend.models.refresh()
    for user in (*USERS[:5], "nobody"):
        whole = ids(await ask(client, user, n=1000))
        for wanted, fits in (
            ({"brand": "a"}, lambda a: a["brand"] == "a"),
            ({"brand": ["a", "b"], "price": {"lt": 20}}, lambda a: a["brand"] in "ab"
             and a["price"] < 20),
            ({"or": [{"in_stock": True}, {"tags": {"contains": "t1"}}]},
             lambda a: a["in_stock"] or "t1" in a["tags"]),
            ({"not": {"brand": "c"}}, lambda a: a["brand"] != "c"),
            ({"brand": "nothing"}, lambda a: False),
        ):  # fmt: skip
            expected = [item for item in whole if fits(ATTRIBUTES[item])]
            assert await filtered(client, user, wanted, n=1000) == expected
            assert await filtered(client, user, wanted, n=4) == expected[:4]
            seen = await filtered(client, user, wanted, n=1000, exclude_seen=False)
            assert set(seen) == {item for item in ITEMS if fits(ATTRIBUTES[item])}
            if expected and user != "nobody":
                left = await filtered(client, user, wanted, n=3, exclude=expected[0])
                assert left == expected[1:4]


async def test_a_change_of_an_attribute_shows_at_once_in_lists_with_a_filter_only(
    client: httpx2.AsyncClient, served: str, app: FastAPI
) -> None:
    wanted = {"brand": "a", "in_stock": True}
    for user in ("user-1", "nobody"):
        plain = await ask(client, user)
        before = await filtered(client, user, wanted, n=50)
        target = before[0]
        for change, there in (({"in_stock": False}, False), ({"in_stock": True}, True),
                              ({"in_stock": None}, False), ({"in_stock": "yes"}, False),
                              ({"in_stock": True, "price": 1e6}, True)):  # fmt: skip
            response = await client.patch(f"/items/{target}", json={"attributes": change})
            assert response.status_code == 200
            after = await filtered(client, user, wanted, n=50)
            assert after == (before if there else before[1:])
        hits = app.state.recommend.lists.cache.hits
        assert (await ask(client, user))["items"] == plain["items"]
        assert app.state.recommend.lists.cache.hits == hits + (user != "nobody")


async def test_another_attribute_leaves_a_filtered_list_in_the_cache(
    client: httpx2.AsyncClient, served: str, app: FastAPI
) -> None:
    first = await filtered(client, "user-1", {"brand": "a"}, n=3)
    hits, misses = app.state.recommend.lists.cache.hits, app.state.recommend.lists.cache.misses
    await client.patch(f"/items/{first[0]}", json={"attributes": {"price": 1000}})
    assert await filtered(client, "user-1", {"brand": ["a", "a"]}, n=3) == first
    assert app.state.recommend.lists.cache.hits == hits + 1
    assert app.state.recommend.lists.cache.misses == misses


async def test_filters_go_with_bodies_batches_and_similar_items(
    client: httpx2.AsyncClient, served: str, app: FastAPI
) -> None:
    wanted = {"brand": "b"}
    batch = await post(client, "/recommend/batch", users=["user-1", "nobody"], n=5, filter=wanted)
    for user, result in zip(["user-1", "nobody"], batch["results"], strict=True):
        assert ids(result) == await filtered(client, user, wanted, n=5)
    ordered = ids(await post(client, "/rerank", user="user-1", items=ITEMS[:20]))
    some = await post(client, "/rerank", user="user-1", items=[*ITEMS[:20], "unknown"],
                      filter=wanted)  # fmt: skip
    assert sorted(ids(some)) == sorted(i for i in ordered if ATTRIBUTES[i]["brand"] == "b")
    other = await post(client, "/rerank", user="user-1", items=["unknown", ITEMS[0]],
                       filter={"brand": {"ne": "a"}})  # fmt: skip
    assert ids(other) == ["unknown"]
    nothing = await post(client, "/rerank", user="nobody", items=ITEMS[:3], filter={"price": 99})
    assert nothing["items"] == []
    for known in (True, False):
        if not known:
            app.state.recommend.models.current = None
        alike = ids((await client.get(f"/items/{ITEMS[1]}/similar?n=1000")).json())
        query = {"n": 1000, "filter": json.dumps(wanted)}
        fitting = await client.get(f"/items/{ITEMS[1]}/similar", params=query)
        assert ids(fitting.json()) == [i for i in alike if ATTRIBUTES[i]["brand"] == "b"]


async def test_few_items_are_ranked_without_a_search(
    client: httpx2.AsyncClient, served: str, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = serving(app).engine.retriever
    monkeypatch.setattr("app.catalog.masks.FEW_ROWS", 0)
    searched = {
        user: (await ask(client, user, filter='{"brand":"a"}', n=50))["items"] for user in USERS[:5]
    }
    monkeypatch.undo()
    app.state.recommend.lists.cache.clear()
    serving(app).candidate_cache.clear()
    app.state.services.catalog._masks.cache.clear()

    def search(*args: Any) -> None:
        raise AssertionError("nothing is to be searched")

    monkeypatch.setattr(retriever, "_search", search)
    for user, expected in searched.items():
        assert (await ask(client, user, filter='{"brand":"a"}', n=50))["items"] == expected
        for skipped in (ids({"items": expected})[:1], ids({"items": expected})[:-1]):
            rest = await ask(client, user, filter='{"brand":"a"}', n=50, exclude=skipped)
            assert ids(rest) == [i for i in ids({"items": expected}) if i not in skipped]


async def test_known_query_strings_keep_their_filters_apart(
    client: httpx2.AsyncClient, served: str
) -> None:
    for _ in range(2):  # the second time the query string is known
        for brand in "abc":
            found = await filtered(client, "user-1", {"brand": brand}, n=5)
            assert {ATTRIBUTES[item]["brand"] for item in found} == {brand}
        assert len({ATTRIBUTES[i]["brand"] for i in ids(await ask(client, "user-1", n=20))}) == 3


async def test_a_list_that_is_kept_is_of_its_own_filter_and_so_is_its_cursor(
    client: httpx2.AsyncClient, served: str, app: FastAPI
) -> None:
    """Whatever was asked for before: the same users by many filters, and each list's next page."""

    def filters() -> list[AttributeFilter]:
        return [one for one in gc.get_objects() if isinstance(one, AttributeFilter)]

    draw, of_other_tests = random.Random(5), filters()
    options: list[dict[str, Any]] = [
        {},
        *({"filter": {"brand": brand}} for brand in "ab"),
        {"filter": {"price": {"lt": 30}}},
        {"filter": {"price": {"lt": 30.5}}},  # the same items by another filter
        {"boost": [{"filter": {"brand": "a"}, "by": 2.0}]},
        {"filter": {"brand": "b"}, "boost": [{"filter": {"in_stock": True}, "by": 2.0}]},
    ]
    wanted = [
        {"user": user, "n": n, "exclude_seen": False, **option}
        for user in (*USERS[:2], "nobody")
        for n in (3, 6)
        for option in options
    ]

    async def pages(one: dict[str, Any]) -> tuple[list[str], list[str], str]:
        first = await post(client, "/recommend", **one)
        cursor = first["next_cursor"]
        return ids(first), ids(await post(client, "/recommend", **one, cursor=cursor)), cursor

    expected = []
    for one in wanted:
        app.state.recommend.lists.cache.clear()
        app.state.recommend.pages._frozen._cache.clear()
        serving(app).candidate_cache.clear()
        expected.append((await pages(one))[:2])
    assert len({str(lists) for lists in expected}) > len(wanted) / 3
    gc.collect()
    kept = [one for one in filters() if not any(one is other for other in of_other_tests)]
    assert not kept  # each may take hundreds of KiB, beside a cached list of a few
    for place in draw.choices(range(len(wanted)), k=120):
        first, second, cursor = await pages(wanted[place])
        assert (first, second) == expected[place]
        other = draw.choice(wanted)
        if {**other, "n": 0} != {**wanted[place], "n": 0}:
            assert await refused(client, "/recommend", **other, cursor=cursor) == (
                422,
                "invalid_cursor",
            )


async def test_a_newcomer_with_events_gets_a_filtered_list(
    client: httpx2.AsyncClient, served: str
) -> None:
    for item in seen_by("user-2")[:5]:
        await post(client, "/events", user="anna", item=item)
    answer = await ask(client, "anna", filter='{"brand":"c"}')
    assert set(sources(answer)) == {"fold_in"}
    assert {ATTRIBUTES[item]["brand"] for item in ids(answer)} == {"c"}


@ON_SQLITE
async def test_bad_filters_have_one_clear_problem(client: httpx2.AsyncClient, served: str) -> None:
    async def problem(text: str) -> tuple[int, str, str]:
        response = await client.get("/recommend/user-1", params={"filter": text})
        assert response.headers["content-type"] == "application/problem+json"
        body = response.json()
        return response.status_code, body["code"], body["detail"]

    for text, code, detail in (
        ("{", "invalid_filter", "filter: the value is not JSON"),
        ('{"price":{"like":1}}', "invalid_filter", "filter.price.like: unknown operator"),
        ('{"brand":{"lt":5}}', "filter_type_mismatch", "filter.brand: `lt` compares with a number"),
        ('{"not":' * 50 + "{}" + "}" * 50, "invalid_filter", "more than 16 objects deep"),
        (json.dumps({"price": list(range(3_000))}), "invalid_filter", "at most 8,192 characters"),
    ):
        for _ in range(2):
            status, got, told = await problem(text)
            assert (status, got) == (422, code)
            assert detail in told
    many = {"price": list(range(10_000))}
    body = {"users": ["user-1"], "filter": many}
    assert await refused(client, "/recommend/batch", **body) == (422, "invalid_filter")
    body = {"users": ["user-1"], "filter": {"brand": 1}}
    assert await refused(client, "/recommend/batch", **body) == (422, "filter_type_mismatch")
    for wrong in ("x", [], 1):
        body = {"user": "user-1", "items": ITEMS[:3], "filter": wrong}
        assert await refused(client, "/rerank", **body) == (422, "invalid_filter")
    response = await client.get(f"/items/{ITEMS[0]}/similar", params={"filter": "[]"})
    assert response.json()["code"] == "invalid_filter"
