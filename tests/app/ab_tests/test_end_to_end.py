"""A whole trial by HTTP alone: two trained versions, lists, clicks by taste, and the report."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.events.schemas import NewEvent
from app.wiring import Services
from ncr_core.data.synthetic import synthetic_catalogue
from tests.app.conftest import add_small_data, publish_model, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DATA = synthetic_catalogue(80, 240, 25)
GENRES = {item.id: item.genre for item in DATA.items}
ROUNDS = 2


def favourites() -> dict[str, str]:
    """By user, the genre that they have had to do with most."""
    histories: dict[str, Counter[str]] = {}
    for user, item, _ in DATA.interactions:
        histories.setdefault(user, Counter())[GENRES[item]] += 1
    return {user: genres.most_common(1)[0][0] for user, genres in histories.items()}


async def test_an_interleaving_trial_finds_the_better_version(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    """The one that is served has hardly been trained. Users click the films in the list that
    are of their favourite genre; nothing else tells the service which version is better."""
    services: Services = app.state.services
    await services.events.import_rows(
        [NewEvent(f"{user} {item}", user, item) for user, item, _ in DATA.interactions]
    )
    trained = await publish_model(services, epochs=40, factors=16, learning_rate=0.05)
    untrained = await publish_model(services, epochs=1, learning_rate=1e-7, pretrain=False)
    await app.state.recommend.models.refresh()
    begun = await client.post(
        "/admin/trials", json={"kind": "interleaving", "version": trained, "share": 1.0}
    )
    assert begun.status_code == 201, begun.text
    trial_id, url = begun.json()["trial_id"], begun.headers["location"]
    tastes = favourites()
    # Until the second version is loaded, the first one answers alone.
    await until(lambda: in_trial(client, trial_id))

    lists = clicked = items = 0
    for _ in range(ROUNDS):
        for user, genre in tastes.items():
            answer = (await client.get(f"/recommend/{user}")).json()
            assert answer["model_version"] == untrained
            assert answer["recommendation_id"].startswith(f"{trial_id}.")
            lists += 1
            liked = [item["id"] for item in answer["items"] if GENRES[item["id"]] == genre]
            if liked:
                clicks = [
                    {"user": user, "item": item, "type": "click",
                     "recommendation_id": answer["recommendation_id"]}
                    for item in liked
                ]  # fmt: skip
                told = await client.post("/events", json=clicks)
                assert told.json()["accepted"] == len(liked)
                clicked += 1
                items += len(liked)

    report: dict[str, Any] = (await client.get(url)).json()["report"]
    assert report["lists"] >= lists
    assert report["clicked"] == clicked
    assert report["wins_a"] + report["wins_b"] + report["ties"] == clicked
    assert report["credit_a"] + report["credit_b"] == items
    assert report["users"] <= len(tastes)
    assert report["better"] == trained, report
    assert report["p"] < 0.05
    assert 0 < report["interval"][0] < report["difference"] < report["interval"][1]

    # What came of a trial is no version's own click-through.
    for version in (trained, untrained):
        found = (await client.get(f"/admin/models/{version}")).json()["click_through"]
        assert found["clicked"] == 0
    ended = (await client.post(f"{url}/stop")).json()
    *_, last = ended["report"].pop("series")  # its times go as far as now
    assert (last["clicked"], last["difference"]) == (clicked, report["difference"])
    del report["series"]
    assert ended["report"] == report | {"ended": "stopped"}
    answer = (await client.get("/recommend/user-1")).json()
    assert answer["recommendation_id"].startswith(f"{untrained}.")


async def in_trial(client: httpx2.AsyncClient, trial_id: str) -> bool:
    answer = (await client.get("/recommend/user-1")).json()
    await asyncio.sleep(0.02)
    return bool(answer["recommendation_id"].startswith(trial_id))


async def test_click_through_counts_served_lists_and_clicks(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    version = await publish_model(services)
    await app.state.recommend.models.refresh()
    for n in range(1, 9):
        answer = (await client.get(f"/recommend/user-{n}")).json()
        if n <= 2:
            for item in answer["items"][:2]:
                event = {"user": f"user-{n}", "item": item["id"], "type": "click",
                         "recommendation_id": answer["recommendation_id"]}  # fmt: skip
                await client.post("/events", json=event)
    found = (await client.get(f"/admin/models/{version}")).json()["click_through"]
    assert found == {"lists": 8, "clicked": 2, "rate": 0.25}
