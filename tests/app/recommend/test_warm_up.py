"""The lists that were asked for last are there when a model takes the place of another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI

from app.core.errors import Unavailable
from app.inference.batcher import Batcher
from app.recommend import warm_up
from app.recommend.schemas import RecommendationQuery
from app.wiring import Services
from tests.app.conftest import publish_model, refresh
from tests.app.recommend.conftest import ask, ids
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, ON_SQLITE]


async def test_who_asked_last_finds_a_list_of_the_new_model(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MAX_USERS", 3)
    services: Services = app.state.services
    for user in ("user-1", "user-2", "nobody", "user-3"):
        await ask(client, user, n=7)
    await ask(client, "user-3", n=50, exclude="film-1")  # nobody asks for the same page again
    version = await publish_model(services)
    await refresh(app)
    lists = app.state.recommend.lists.cache
    hits, misses = lists.hits, lists.misses
    made = {user: await ask(client, user, n=7) for user in ("user-2", "user-3")}
    assert (lists.hits - hits, lists.misses - misses) == (2, 0)
    assert {answer["model_version"] for answer in made.values()} == {version}
    lists.clear()
    for user, answer in made.items():
        assert (await ask(client, user, n=7))["items"] == answer["items"]
    hits = lists.hits
    await ask(client, "user-1", n=7)
    assert lists.hits == hits


@pytest.mark.usefixtures("database_url")  # whose only parameter is SQLite
async def test_nothing_goes_on_after_an_error() -> None:
    built: list[str] = []

    class Contexts:
        async def precomputed_list(self, *_: object) -> None:
            return None

        async def load(self, user: str, query: object) -> SimpleNamespace:
            return SimpleNamespace(user=user, user_key=user)

    class Lists:
        async def build(self, context: SimpleNamespace, model: object) -> None:
            await asyncio.sleep(0)
            built.append(context.user)
            if len(built) == 8:
                raise ValueError("a defect")

    warm = warm_up.WarmUp(cast(Any, Contexts()), cast(Any, Lists()))
    for n in range(50):
        warm.record(f"user-{n}", RecommendationQuery())
    before = asyncio.all_tasks()
    await warm.run(cast(Any, SimpleNamespace(version="v")))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert len(built) < 40


@pytest.mark.parametrize("problem", ["slow", "busy", "broken"])
async def test_a_swap_does_not_depend_on_it(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "MAX_SECONDS", 0.05)
    before = ids(await ask(client, "user-1"))

    async def rank(*args: Any, **kwargs: Any) -> Any:
        if problem == "slow":
            await asyncio.sleep(3600)
        raise Unavailable("too many wait") if problem == "busy" else ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "rank", rank)
        version = await publish_model(app.state.services)
        await refresh(app)
    answer = await ask(client, "user-1")
    assert (answer["model_version"], len(ids(answer))) == (version, len(before))
