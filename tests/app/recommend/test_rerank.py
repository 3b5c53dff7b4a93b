"""Items that a caller names: ranked and compared as the paper says, and none is lost."""

from __future__ import annotations

import math
import random
from collections import Counter

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from app.wiring import Services
from ncr_core.inference import engine as engine_module
from ncr_core.inference.engine import RerankRequest
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.ranking import algorithm1
from tests.app.conftest import SMALL, publish_model
from tests.app.recommend.conftest import (
    ITEMS,
    ask,
    ids,
    margins_of,
    post,
    refused,
    seen_by,
    serving,
    sources,
)
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, ON_SQLITE]


@pytest.fixture(params=["nbpr", "neupr"])
async def served(request: pytest.FixtureRequest, app: FastAPI, filled: Services) -> str:
    """A model with a tower, and one without."""
    version = await publish_model(filled, model=request.param, epochs=3, pretrain=False)
    await app.state.recommend.models.refresh()
    return version


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
async def test_a_list_is_ranked_by_the_literal_algorithm_in_the_order_it_is_given_in(
    app: FastAPI, client: httpx2.AsyncClient, served: str, seed: int
) -> None:
    model = serving(app)
    known = [item for item in ITEMS if item in set(model.item_ids)]
    random.Random(seed).shuffle(known)
    answer = await post(client, "/rerank", user="user-1", items=known)
    margins = margins_of(model, "user-1")
    expected = algorithm1(known, lambda x, y: margins[x, y] > 0, len(known))
    assert ids(answer) == expected
    assert answer["model_version"] == served
    assert answer["recommendation_id"].startswith(served)
    assert set(sources(answer)) == {"model"}
    assert [item["rank"] for item in answer["items"]] == list(range(1, len(known) + 1))
    # The user's own items stay, and every item's score is that of their list.
    own = {item["id"]: item["score"] for item in (await ask(client, "user-1", n=50))["items"]}
    assert set(seen_by("user-1")) - set(own)
    for item in answer["items"]:
        if own.get(item["id"]) is not None:
            assert item["score"] == pytest.approx(own[item["id"]], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "best first"])
async def test_of_many_items_the_best_are_ranked_exactly_and_the_others_by_their_mean_margin(
    app: FastAPI,
    client: httpx2.AsyncClient,
    served: str,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = serving(app)
    known = [item for item in ITEMS if item in set(model.item_ids)]
    random.Random(2).shuffle(known)
    if order == "best first":  # the worst order: the champion stays, and every pair is compared
        known = ids(await post(client, "/rerank", user="user-1", items=known))
    monkeypatch.setattr(engine_module, "MAX_EXACT_ITEMS", 12)
    metrics = app.state.inference_metrics
    pairs = metrics.pairs._value.get()
    answer = await post(client, "/rerank", user="user-1", items=known)
    assert metrics.pairs._value.get() - pairs <= 12 * 11 / 2
    margins = margins_of(model, "user-1")
    if model.engine.ranker.margins.additive:  # sorted: no pair is compared for any of them
        expected = algorithm1(known, lambda x, y: margins[x, y] > 0, len(known))
    else:
        anchors = [model.item_ids[row] for row in model.engine._anchors.tolist()]
        mean = {item: sum(margins[item, anchor] for anchor in anchors) for item in known}
        by_margin = sorted(known, key=lambda item: -mean[item])
        best = [item for item in known if item in by_margin[:12]]
        expected = algorithm1(best, lambda x, y: margins[x, y] > 0, 12) + by_margin[12:]
    assert ids(answer) == expected
    assert set(sources(answer)) == {"model"}
    assert all(0 < item["preferred_over_next"] < 1 for item in answer["items"][:-1])


async def test_no_request_compares_more_pairs_than_the_batcher_expects_of_it(
    app: FastAPI, client: httpx2.AsyncClient, served: str
) -> None:
    engine, pairs = serving(app).engine, app.state.inference_metrics.pairs._value
    everything = ItemFilter(np.ones(engine.n_items, dtype=np.bool_))
    for n in (1, 10, 40, 50):
        before = pairs.get()
        await ask(client, "user-1", n=n, exclude_seen=False)
        expected = engine.pairs_to_rank(RankRequest(UserState(0), n, everything))
        assert pairs.get() - before <= expected <= 50 * 49 / 2 + 50 * 17
        before = pairs.get()
        await post(client, "/rerank", user="user-1", items=ITEMS[:n])
        expected = engine.pairs_to_rerank(RerankRequest(UserState(0), np.arange(n)))
        assert pairs.get() - before <= expected
        assert (expected == 0) == engine.ranker.margins.additive


async def test_a_comparison_is_that_of_the_network(
    app: FastAPI, client: httpx2.AsyncClient, served: str
) -> None:
    model, items = serving(app), seen_by("user-2")[:3] + seen_by("user-3")[:3]
    items = list(dict.fromkeys(items))
    answer = await post(client, "/compare", user="user-1", items=[*items, items[0]])
    assert (answer["user"], answer["model_version"]) == ("user-1", served)
    assert answer["items"] == items  # each once
    assert answer["source"] == "model"
    found = answer["probability"]
    margins = margins_of(model, "user-1")
    for i, over in enumerate(items):
        assert found[i][i] == 0.5
        for j, under in enumerate(items):
            expected = 1 / (1 + math.exp(-margins[over, under] / 2 / model.engine.temperature))
            assert found[i][j] == pytest.approx(expected, abs=2e-6)
            assert found[i][j] + found[j][i] == pytest.approx(1, abs=1e-9)
    places = algorithm1(range(len(items)), lambda i, j: found[i][j] > 0.5, len(items))
    assert answer["order"] == [items[at] for at in places]
    assert answer["order"] == ids(await post(client, "/rerank", user="user-1", items=items))
    # One below the other in a list is a comparison, too.
    listed = await post(client, "/rerank", user="user-1", items=items[:2])
    at = [items.index(item) for item in ids(listed)]
    first = listed["items"][0]["preferred_over_next"]
    assert first == pytest.approx(found[at[0]][at[1]], abs=2e-6)


async def test_the_temperature_of_the_calibration_softens_every_probability(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    model = serving(app)
    app.state.recommend.lists.cache.clear()
    sharp = await post(client, "/compare", user="user-1", items=ITEMS[:4])
    sharp_list = await ask(client, "user-1", n=5)
    model.engine.temperature *= 3.0
    app.state.recommend.lists.cache.clear()
    soft = await post(client, "/compare", user="user-1", items=ITEMS[:4])
    soft_list = await ask(client, "user-1", n=5)
    assert soft["order"] == sharp["order"]
    assert ids(soft_list) == ids(sharp_list)

    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    for before, after in zip(sharp["probability"], soft["probability"], strict=True):
        for p, q in zip(before, after, strict=True):
            assert logit(p) == pytest.approx(3.0 * logit(q), abs=1e-3)
    for before, after in zip(sharp_list["items"][:-1], soft_list["items"][:-1], strict=True):
        p, q = before["preferred_over_next"], after["preferred_over_next"]
        assert logit(p) == pytest.approx(3.0 * logit(q), abs=1e-3)
        assert abs(after["score"] - 0.5) < abs(before["score"] - 0.5)


async def test_nothing_that_was_asked_for_is_left_out(
    client: httpx2.AsyncClient, trained: str
) -> None:
    await client.put("/items/late", json={"title": "Came late"})
    best, hidden, deleted = ids(await ask(client, "user-1", n=3))
    await client.patch(f"/items/{hidden}", json={"hidden": True})
    await client.delete(f"/items/{deleted}")
    asked = ["no such", "late", best, hidden, deleted, best, "late", *seen_by("user-1")[:2]]
    answer = await post(client, "/rerank", user="user-1", items=asked)
    assert sorted(ids(answer)) == sorted(set(asked))
    assert ids(answer)[-2:] == ["no such", "late"]
    last = answer["items"][-2]
    assert (last["title"], last["source"], last["score"]) == (None, "popular", None)
    assert answer["items"][-1]["title"] == "Came late"
    assert sources(answer)[:-2] == ["model"] * 5
    assert answer["items"][-3]["preferred_over_next"] is None
    only = await post(client, "/rerank", user="user-1", items=["late", "no such"])
    assert ids(only) == ["late", "no such"]


async def test_who_is_not_known_gets_them_by_popularity(
    client: httpx2.AsyncClient, trained: str
) -> None:
    counts = Counter(item for _, item, _ in SMALL.interactions)
    asked = [*ITEMS[:12], "no such"]
    answer = await post(client, "/rerank", user="nobody", items=asked)
    assert ids(answer) == sorted(asked, key=lambda item: -counts[item])  # stable, as theirs is
    assert set(sources(answer)) == {"popular"}
    assert all(item["score"] is None for item in answer["items"])


async def test_without_a_model(client: httpx2.AsyncClient, filled: Services) -> None:
    counts = Counter(item for _, item, _ in SMALL.interactions)
    answer = await post(client, "/rerank", user="user-1", items=ITEMS)
    assert ids(answer) == sorted(ITEMS, key=lambda item: -counts[item])
    assert answer["model_version"] is None
    assert await refused(client, "/compare", user="u", items=ITEMS[:2]) == (409, "no_model")


async def test_a_comparison_for_someone_of_whom_nothing_is_known_is_the_mean_users(
    client: httpx2.AsyncClient, trained: str
) -> None:
    answer = await post(client, "/compare", user="nobody", items=ITEMS[:5])
    assert answer["source"] == "popular"
    assert (
        answer["probability"]
        != (await post(client, "/compare", user="user-1", items=ITEMS[:5]))["probability"]
    )
    other = await post(client, "/compare", user="somebody else", items=ITEMS[:5])
    assert other["probability"] == answer["probability"]


async def test_what_happened_after_training_is_taken_in(
    client: httpx2.AsyncClient, trained: str
) -> None:
    before = await post(client, "/compare", user="user-1", items=ITEMS[:6])
    fresh = [item for item in ITEMS[:6] if item not in seen_by("user-1")][:2]
    rows = [{"user": "user-1", "item": item} for item in fresh]
    seq = (await client.post("/events", json=rows)).json()["last_seq"]
    after = await post(client, "/compare", user="user-1", items=ITEMS[:6], min_seq=seq)
    assert (after["source"], after["as_of_seq"]) == ("fold_in", seq)
    assert after["probability"] != before["probability"]
    answer = await post(client, "/rerank", user="user-1", items=ITEMS[:6], min_seq=seq)
    assert ids(answer) == after["order"]
    assert set(sources(answer)) == {"fold_in"}
    for path in ("/rerank", "/compare"):
        for late in (seq + 1, 2**53 - 1):  # the largest one that is allowed
            body = {"user": "user-1", "items": ITEMS[:2], "min_seq": late}
            assert await refused(client, path, **body) == (409, "seq_not_reached")


async def test_bodies_that_are_refused(client: httpx2.AsyncClient, trained: str) -> None:
    many = [f"i{n}" for n in range(1001)]
    assert await refused(client, "/rerank", user="u", items=many) == (413, "too_many_items")
    assert (await post(client, "/rerank", user="u", items=many[:1000]))["items"]
    assert await refused(client, "/compare", user="u", items=many[:101]) == (413, "too_many_items")
    found = await refused(client, "/compare", user="u", items=[ITEMS[0], "no such", "nor this"])
    assert found == (422, "item_not_ranked")
    for path in ("/rerank", "/compare"):
        for body in (
            {"user": "u"},
            {"user": "u", "items": []},
            {"user": "u", "items": "i"},
            {"user": "u", "items": [1]},
            {"user": "u", "items": [""]},
            {"user": "u", "items": ["a\0b"]},
            {"user": "u", "items": ["x" * 257]},
            {"user": "", "items": ["a"]},
            {"user": "u", "items": ["a"], "other": 1},
            {"user": "u", "items": ["a"], "min_seq": "1"},
            {"user": "u", "items": ["a"], "min_seq": -1},
            {"user": "u", "items": ["a"], "min_seq": 2**53},
        ):
            assert (await refused(client, path, **body)) == (422, "invalid_request"), body
        assert await refused(client, path, user="u", items=["a"], model="nope") == (
            404,
            "unknown_model",
        )
        for content, status in ((b"[]", 422), (b"{", 400), (b"", 400)):
            response = await client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == status, content
