"""From a profile and a query to what is ranked: evidence, dislikes, bounds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from app.events.event_weights import EventWeights
from app.events.profile import Profile
from app.events.schemas import NewEvent
from app.inference.loaded_model import ItemIndex, SearchedItems
from app.recommend import service
from app.recommend.context import (
    MAX_EVIDENCE,
    RecommendationContext,
    fold_in_evidence,
    rank_request,
    user_state,
)
from app.recommend.schemas import RecommendationQuery
from app.wiring import Services
from ncr_core.data.synthetic import synthetic_sittings
from tests.app.conftest import interactions_of, publish_model, refresh
from tests.app.recommend.conftest import ITEMS, ask, ids, post, serving, sources

SEARCHED = SearchedItems.of(np.ones(10, dtype=np.bool_))
INDEX = ItemIndex(
    seq=1,
    internal=np.arange(10),
    visible=np.ones(10, dtype=np.bool_),
    trained=SEARCHED,
    searched=SEARCHED,
    hidden=np.arange(0),
    row_of=np.arange(10),
    moment=0,
    shown_seq=1,
    catalogue_shown_seq=1,
)


def profile(*events: tuple[int, float]) -> Profile:
    """Of items and weights, with the seqs 1, 2, …"""
    items, weights = zip(*events, strict=True)
    seqs = np.arange(1, len(events) + 1)
    return Profile(
        user_id=1,
        last_seq=len(events),
        seen=np.array(items),
        seqs=seqs,
        weights=np.array(weights, dtype=np.float32),
        timestamps=seqs,
        preferences=np.zeros((0, 4), dtype=np.int64),
        event_seq=len(events),
        catalog_seq=1,
        event_weights=EventWeights.parse(None),
    )


def test_what_was_only_seen_again_is_no_news() -> None:
    """Of what was bought, or disliked, before the training; what came since is fitted to."""
    user = profile((3, 3.0), (4, -1.0), (3, 0.0), (4, 0.0), (5, 0.0))
    assert fold_in_evidence(user, INDEX, after=2) is None
    news = fold_in_evidence(profile((3, 3.0), (4, -1.0), (3, 0.0), (6, 1.0)), INDEX, after=2)
    assert news is not None
    assert (news.items.tolist(), news.disliked.tolist()) == ([6], [])
    again = fold_in_evidence(profile((3, 3.0), (4, -1.0), (3, 1.0)), INDEX, after=2)
    assert again is not None
    assert again.items.tolist() == [3]
    every = fold_in_evidence(user, INDEX, after=0)
    assert every is not None
    assert (every.items.tolist(), every.disliked.tolist()) == ([3], [4])


async def everything(client: httpx2.AsyncClient, user: str, **params: Any) -> set[str]:
    found = ids(await ask(client, user, n=1000, exclude_seen=False, **params))
    batch = await post(
        client, "/recommend/batch", users=[user], n=1000, exclude_seen=False, **params
    )
    assert ids(batch["results"][0]) == found
    return set(found)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("who", ["user-1", "fresh", "only dislikes"])
@pytest.mark.parametrize("model", [True, False], ids=["model", "no model"])
async def test_in_no_list(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, who: str, model: bool
) -> None:
    if model:
        await publish_model(filled)
        await app.state.recommend.models.refresh()
    if who == "fresh":
        await post(client, "/events", user=who, item=ITEMS[5])
    best = ids(await ask(client, who, exclude_seen=False))[0]
    before = await everything(client, who)
    assert best in before
    await post(client, "/events", user=who, item=best, type="dislike")
    for options in ({}, {"diversity": 0.5}, {"explain": "pairwise"}):
        assert await everything(client, who, **options) == before - {best}


@pytest.mark.anyio
async def test_a_fast_clock_does_not_outweigh_a_dislike(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    """The click is an hour ahead by the phone's clock; the dislike comes a second later."""
    item = ids(await ask(client, "user-2"))[0]
    late = {"user": "user-2", "item": item, "type": "click", "timestamp": time.time() + 3600}
    await post(client, "/events", **late)
    await post(client, "/events", user="user-2", item=item, type="dislike")
    assert item not in ids(await ask(client, "user-2", n=100, exclude_seen=False))
    services: Services = app.state.services
    assert len((await services.events.profiles.get("user-2")).disliked) == 1
    learned = interactions_of(services)
    assert learned.feedback is not None
    disliked = [learned.user_ids.index("user-2"), learned.item_ids.index(item)]
    assert learned.feedback.disliked.tolist() == [disliked]
    events = (await client.get("/users/user-2/events?n=2")).json()["items"]
    assert events[1]["timestamp"] > events[0]["timestamp"]  # told as it was given


@pytest.mark.anyio
async def test_thousands_of_statements_are_fitted_to_the_latest(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    rng = np.random.default_rng(0)
    pairs = {tuple(map(int, rng.choice(len(ITEMS), 2, replace=False))) for _ in range(6000)}
    rows = [{"user": "talker", "winner": ITEMS[a], "loser": ITEMS[b]} for a, b in sorted(pairs)]
    services: Services = app.state.services
    await services.events.add_preferences(rows, 0)
    profile = await services.events.profiles.get("talker")
    assert len(profile.pairs) == len(profile.pair_seqs) > MAX_EVIDENCE
    catalogue = await services.catalog.catalogue(profile.catalog_seq)
    model = serving(app)
    evidence = fold_in_evidence(profile, model.items(catalogue), 0)
    assert evidence is not None
    assert len(evidence.pairs) == MAX_EVIDENCE
    rows_of = model.items(catalogue).rows(profile.pairs[-1])
    assert evidence.pairs[-1].tolist() == rows_of.tolist()
    assert RecommendationContext("talker", RecommendationQuery(3), profile, catalogue).user_key == (
        "talker",
        profile.last_seq,
    )
    answer = await ask(client, "talker", n=3)
    assert {place["source"] for place in answer["items"]} == {"fold_in"}
    questions = (await client.get("/users/talker/questions?n=3")).raise_for_status().json()
    assert len(questions["items"]) == 3


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_list_depends_on_how_long_the_user_has_been_away(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an hour it goes on with the sitting; every class of gaps has its own cached list."""
    services: Services = app.state.services
    rows = synthetic_sittings(n_users=250, n_items=100)
    await services.events.import_rows(
        [
            NewEvent(f"{user} {item}", user, item, timestamp=int(seconds * 1e6))
            for user, item, seconds in rows
        ]
    )
    await publish_model(services, recipe="next-item", factors=32)
    await refresh(app)
    user, _, last = rows[-1]

    async def after(seconds: float) -> dict[str, Any]:
        monkeypatch.setattr(service, "now_us", lambda: int((last + seconds) * 1e6))
        answer = await ask(client, user, explain="pairwise")
        batch = await post(client, "/recommend/batch", users=[user], n=10)
        assert ids(batch["results"][0]) == ids(answer)
        reranked = await post(client, "/rerank", user=user, items=sorted(ids(answer)))
        assert ids(reranked) == ids(answer)
        return answer

    goes_on, back, much_later = [await after(seconds) for seconds in (60, 7_200, 90_000)]
    assert ids(goes_on) != ids(back)
    assert back["items"] != much_later["items"]  # the scores, at least
    assert {*sources(goes_on), *sources(back)} == {"model"}
    for seconds, answer in ((3_599, goes_on), (-60, goes_on), (86_399, back), (1e8, goes_on)):
        assert (await after(seconds))["items"] == answer["items"]
    # So have the candidates.
    profile = await services.events.profiles.get(user)
    catalogue = await services.catalog.catalogue(profile.catalog_seq)
    context = RecommendationContext(user, RecommendationQuery(10), profile, catalogue)
    times = [int((last + seconds) * 1e6) for seconds in (60, 7_200, 90_000)]
    requests = [rank_request(replace(context, at_us=at), serving(app)) for at in times]
    assert len({request.key for request in requests if request is not None}) == 3
    # Who has only stated preferences has never been away.
    stated = {"user": "talker", "winner": "item-1", "loser": "item-2"}
    (await client.post("/preferences", json=stated)).raise_for_status()
    talker = await services.events.profiles.get("talker")
    context = RecommendationContext(
        "talker", RecommendationQuery(10), talker, catalogue, at_us=2**50
    )
    state = user_state(context, serving(app))
    assert state is not None
    assert state.gap_class == 0
    # With an event the sitting goes on.
    event = {"user": user, "item": ids(back)[0], "timestamp": last + 7_200}
    (await client.post("/events", json=event)).raise_for_status()
    assert sources(await after(7_260)) == ["fold_in"] * 10


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/recommend/user-1?model=%00", "/recommend/user-1?model=a%00b"])
async def test_a_model_that_cannot_be_there(
    client: httpx2.AsyncClient, trained: str, path: str
) -> None:
    response = await client.get(path)
    assert (response.status_code, response.json()["code"]) in (
        (404, "unknown_model"), (422, "invalid_request"),
    )  # fmt: skip
    for route, body in (
        ("/recommend/batch", {"users": ["u"]}),
        ("/rerank", {"user": "u", "items": ["film-1"]}),
        ("/compare", {"user": "u", "items": ["film-1", "film-2"]}),
    ):
        response = await client.post(route, json=body | {"model": "a\0b"})
        assert response.status_code in (404, 422)
