"""Models whose users' vectors are made of their items, from the request for training to lists."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.settings import Settings
from app.inference.new_items import NewItems
from app.wiring import Services
from tests.app.recommend.requests import USERS, ask, ids, post, seen_by, serving
from tests.app.trained_models import add_small_data, publish_model, run_job_here
from tests.app.worker.test_worker import run_job
from tests.conftest import ON_SQLITE

# Each trains: jobs on PostgreSQL have tests of their own.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, ON_SQLITE]

SHORT: dict[str, Any] = {"users": "history", "factors": 4, "epochs": 4, "force": True}


@pytest.fixture
async def filled(app: FastAPI) -> Services:
    services: Services = app.state.services
    await add_small_data(services)
    return services


async def sources(client: httpx2.AsyncClient, user: str, **params: Any) -> set[str]:
    return {place["source"] for place in (await ask(client, user, **params))["items"]}


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
async def test_lists_of_history_models_follow_new_events(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, settings: Settings, kind: str
) -> None:
    job = await run_job_here(filled, settings, model=kind, **SHORT)
    assert (job.status, job.error) == ("succeeded", None)
    assert (job.metrics or {})["calibration"]["ece"] < 0.5
    manager = app.state.recommend.models
    await manager.refresh()
    model = serving(app)
    assert model.engine.pools_users
    assert await sources(client, "user-1") == {"model"}

    # Somebody new, item by item; what they dislike and state counts at once, too.
    lists = []
    for item in seen_by("user-2")[:4]:
        await post(client, "/events", user="anna", item=item)
        lists.append(ids(await ask(client, "anna")))
    assert await sources(client, "anna") == {"fold_in"}
    assert len({tuple(found) for found in lists}) == 4
    best = lists[-1][0]
    last = lists[-1][-1]
    body = {"user": "anna", "winner": last, "loser": best}
    assert (await client.post("/preferences", json=body)).status_code == 201
    compared = await post(client, "/compare", user="anna", items=[last, best])
    ahead = compared["probability"][0][1]
    # As someone with the same items who said nothing.
    for item in seen_by("user-2")[:4]:
        await post(client, "/events", user="otto", item=item)
    alone = await post(client, "/compare", user="otto", items=[last, best])
    assert ahead > alone["probability"][0][1]
    await post(client, "/events", user="anna", item=best, type="dislike")
    assert best not in ids(await ask(client, "anna", n=100, exclude_seen=False))

    explained = await ask(client, "user-1", explain="pairwise")
    own = {reason["id"] for place in explained["items"] for reason in place["because"]}
    assert own
    assert own <= set(seen_by("user-1"))

    before = ids(await ask(client, "user-3"))
    body = [{"user": user, "item": "brand-new"} for user in USERS[20:26]]
    assert (await client.post("/events", json=body)).json()["accepted"] == 6
    await manager.add_new_items(NewItems(filled.events, filled.catalog, 5))
    assert serving(app).item_ids[-1] == "brand-new"
    after = [item for item in ids(await ask(client, "user-3", n=11)) if item != "brand-new"]
    assert after[: len(before)] == before


async def test_free_and_history_models_replace_each_other_through_the_gate(
    services: Services, settings: Settings
) -> None:
    """The gate compares them, and a warm start takes those of the same kind."""
    await add_small_data(services)
    first = await publish_model(services)
    second = await run_job(services, settings, **SHORT)
    gate = (second.metrics or {})["gate"]
    assert (gate["incumbent"], gate["served"]) == (first, True)
    assert gate["users"] > 20
    third = await run_job_here(services, settings, **SHORT | {"start": "warm"})
    assert (third.metrics or {})["start"] == {"from": "warm", "version": second.model_version}
    row = await services.models.get(str(third.model_version))
    assert row.params["users"] == "history"
    fourth = await run_job_here(services, settings, force=True, factors=4)
    assert (fourth.metrics or {})["gate"]["incumbent"] == third.model_version
