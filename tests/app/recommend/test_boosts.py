"""Lists with boosts: log-odds for some items, with a model and without."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from app.wiring import Services
from ncr_core.ranking import algorithm1
from tests.app.conftest import publish_model
from tests.app.recommend.conftest import (
    ITEMS,
    USERS,
    ask,
    ids,
    margins_of,
    post,
    refused,
    seen_by,
    serving,
)
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, ON_SQLITE]

BRANDS = {item: "abc"[number % 3] for number, item in enumerate(ITEMS)}
BOOST = [{"filter": {"brand": "a"}, "by": 0.8}, {"filter": {"price": {"gt": 30}}, "by": -1.5}]


def added(item: str) -> float:
    return 0.8 * (BRANDS[item] == "a") - 1.5 * (ITEMS.index(item) > 30)


@pytest.fixture
async def described(app: FastAPI, filled: Services) -> Services:
    await filled.catalog.upsert_rows(
        [
            {"id": item, "attributes": {"brand": BRANDS[item], "price": number}}
            for number, item in enumerate(ITEMS)
        ]
    )
    return filled


@pytest.fixture(params=["nbpr", "neupr"])
async def served(request: pytest.FixtureRequest, app: FastAPI, described: Services) -> str:
    version = await publish_model(described, model=request.param, epochs=4, pretrain=False)
    await app.state.recommend.models.refresh()
    return version


async def boosted(client: httpx2.AsyncClient, user: str, boost: Any, **more: Any) -> dict[str, Any]:
    return await ask(client, user, boost=json.dumps(boost), **more)


async def test_lists_are_those_of_algorithm1_on_boosted_margins(
    app: FastAPI, client: httpx2.AsyncClient, served: str
) -> None:
    model = serving(app)
    temperature = model.engine.temperature
    retriever = model.engine.retriever
    for user in USERS[:4]:
        margins = margins_of(model, user)

        def log_odds(i: str, j: str, margins: Any = margins) -> float:
            of_model: float = margins[i, j] / (2 * temperature)
            return of_model + added(i) - added(j)

        answer = await boosted(client, user, BOOST, n=50)
        assert len(retriever._lists) > 0  # type: ignore[arg-type]
        unseen = [item for item in ITEMS if item not in seen_by(user)]
        assert sorted(ids(answer)) == sorted(unseen)
        # A tournament: each is preferred to the next one, or nobody is to all that follow.
        ranked = [model.item_ids.index(item) for item in ids(answer)]
        if model.row.kind == "nbpr":
            expected = sorted(unseen, key=lambda item: -log_odds(item, unseen[0]))
            assert ids(answer) == expected
        rerun = await post(client, "/rerank", user=user, items=unseen, boost=BOOST)
        literal = algorithm1(unseen, lambda i, j: log_odds(i, j) > 1e-9, len(unseen))
        assert ids(rerun) == literal
        references = [model.item_ids[row] for row in model.engine.references.tolist()]
        for one in (answer, rerun):
            for item, after in zip(one["items"], one["items"][1:], strict=False):
                odds = log_odds(item["id"], after["id"])
                assert item["preferred_over_next"] == pytest.approx(sigma(odds), abs=2e-5)
                of_references = [sigma(log_odds(item["id"], r)) for r in references]
                assert item["score"] == pytest.approx(np.mean(of_references), abs=2e-5)
        assert len(set(ranked)) == len(ranked)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


async def test_a_boost_follows_attributes_at_once_and_plain_lists_stay(
    app: FastAPI, client: httpx2.AsyncClient, served: str
) -> None:
    strong = [{"filter": {"brand": "new"}, "by": 60}]
    for user in ("user-1", "nobody"):
        plain = await ask(client, user)
        last = ids(await ask(client, user, n=1000))[-1]
        assert ids(await boosted(client, user, strong)) == ids(plain)
        await client.patch(f"/items/{last}", json={"attributes": {"brand": "new"}})
        assert ids(await boosted(client, user, strong))[0] == last
        down = [{"filter": {"brand": "new"}, "by": -60}]
        assert ids(await boosted(client, user, down, n=1000))[-1] == last
        assert (await ask(client, user))["items"] == plain["items"]
        await client.patch(f"/items/{last}", json={"attributes": {"brand": "old"}})
        assert ids(await boosted(client, user, strong)) == ids(plain)


async def test_boosts_of_all_items_and_of_nothing_are_no_boosts(
    client: httpx2.AsyncClient, served: str
) -> None:
    plain = await ask(client, "user-1")
    one, same = {"filter": {"brand": "a"}}, {"filter": {"brand": ["a"]}}
    for boost in (
        [],
        [{"filter": {}, "by": 5}],
        [one | {"by": 0}],
        [one | {"by": 3}, same | {"by": -3}],
    ):
        assert (await boosted(client, "user-1", boost))["items"] == plain["items"]


async def test_newcomers_get_popular_items_by_boosted_popularity(
    app: FastAPI, client: httpx2.AsyncClient, described: Services
) -> None:
    counts = dict.fromkeys(ITEMS, 0)
    for user in USERS:
        for item in set(seen_by(user)):
            counts[item] += 1
    whole = ids(await ask(client, "nobody", n=50))
    expected = sorted(
        whole, key=lambda item: (-round(math.log1p(counts[item]) + added(item), 9), -counts[item])
    )
    answer = ids(await boosted(client, "nobody", BOOST, n=50))
    scores = [math.log1p(counts[item]) + added(item) for item in answer]
    assert scores == pytest.approx(sorted(scores, reverse=True))
    assert set(answer) == set(expected)
    await client.put("/items/fresh", json={"attributes": {"brand": "fresh"}})
    first = [{"filter": {"brand": "fresh"}, "by": 50}]
    assert ids(await boosted(client, "nobody", first))[0] == "fresh"


async def test_boosted_popular_items_follow_counts_that_change_no_ranking(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.recommend.popularity.INCREMENT_SECONDS", 0)
    for item in ("a", "b"):
        await client.put(f"/items/{item}", json={"attributes": {"name": item}})
    took = [{"user": f"u{n}", "item": item} for item, k in (("a", 3), ("b", 2)) for n in range(k)]
    await client.post("/events", json=took)
    boost = [{"filter": {"name": "b"}, "by": 0.5}]  # log 4 < log 3 + 0.5
    assert ids(await boosted(client, "nobody", boost, n=2)) == ["b", "a"]
    await client.post("/events", json=[{"user": f"v{n}", "item": "a"} for n in range(20)])
    assert ids(await boosted(client, "nobody", boost, n=2)) == ["a", "b"]


async def test_boosts_go_with_filters_and_company(client: httpx2.AsyncClient, served: str) -> None:
    wanted = {"brand": ["a", "b"]}
    users = ["user-1", "user-2", "nobody"]
    batch = await post(client, "/recommend/batch", users=users, n=6, filter=wanted, boost=BOOST)
    for user, result in zip(users, batch["results"], strict=True):
        alone = await boosted(client, user, BOOST, n=6, filter=json.dumps(wanted))
        assert ids(result) == ids(alone)
        assert {BRANDS[item] for item in ids(alone)} <= {"a", "b"}


async def test_bad_boosts_have_one_clear_problem(client: httpx2.AsyncClient) -> None:
    for text, detail in (
        ("x", "boost: the value is not JSON"),
        ("{}", "boost: a boost list has objects"),
        ("[1]", "boost[0]: a boost is an object with `filter` and `by`"),
        ('[{"filter":{}}]', "boost[0]: a boost is an object"),
        ('[{"filter":{},"by":1,"x":2}]', "boost[0]: a boost is an object"),
        ('[{"filter":{},"by":NaN}]', "boost[0].by: log-odds are a number from"),
        ('[{"filter":{},"by":Infinity}]', "boost[0].by: log-odds are a number from"),
        ('[{"filter":{},"by":-1e999}]', "boost[0].by: log-odds are a number from"),
        ('[{"filter":{},"by":101}]', "boost[0].by: log-odds are a number from"),
        ('[{"filter":{},"by":true}]', "boost[0].by: log-odds are a number from"),
        ('[{"filter":{},"by":"1"}]', "boost[0].by: log-odds are a number from"),
        (json.dumps([{"filter": {}, "by": 1}] * 17), "boost: a request has at most 16"),
    ):
        response = await client.get("/recommend/user-1", params={"boost": text})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_boost")
        assert detail in response.json()["detail"]
    response = await client.get(
        "/recommend/u", params={"boost": '[{"filter":{"a":{"like":1}},"by":1}]'}
    )
    assert response.json()["code"] == "invalid_filter"
    assert "boost[0].filter.a.like" in response.json()["detail"]
    body = {"users": ["u"], "boost": {"by": 1}}
    assert await refused(client, "/recommend/batch", **body) == (422, "invalid_boost")
