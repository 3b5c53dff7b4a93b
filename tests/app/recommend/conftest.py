"""Questions to the service, and what is in its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import product
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import torch
from fastapi import FastAPI

from app.core.http_protocol import BoundedProtocol
from app.core.settings import Settings
from app.inference.loaded_model import LoadedModel
from app.main import create_app
from tests.app.conftest import SMALL, listening

ITEMS = [item.id for item in SMALL.items]
GENRES = {item.id: item.genre for item in SMALL.items}
USERS = list(dict.fromkeys(user for user, _, _ in SMALL.interactions))


@pytest.fixture
def server_settings(settings: Settings) -> Settings:
    """Those of each of the `servers`, but for Redis."""
    return settings


@pytest.fixture(params=["alone", "with redis"])
async def servers(
    request: pytest.FixtureRequest, server_settings: Settings
) -> AsyncIterator[tuple[list[FastAPI], list[httpx2.AsyncClient]]]:
    """Two servers of one database over real HTTP, without Redis and with it."""
    settings = server_settings
    if request.param == "with redis":
        settings = settings.model_copy(
            update={
                "redis_url": request.getfixturevalue("redis_url"),
                "redis_prefix": request.getfixturevalue("redis_prefix"),
            }
        )
    async with AsyncExitStack() as stack:
        apps, clients = [], []
        for _ in range(2):
            app = create_app(settings)
            port = await stack.enter_async_context(listening(app, BoundedProtocol))
            url = f"http://127.0.0.1:{port}"
            clients.append(await stack.enter_async_context(httpx2.AsyncClient(base_url=url)))
            apps.append(app)
        yield apps, clients


def seen_by(user: str) -> list[str]:
    """A user's items in the small data, oldest first."""
    return [item for name, item, _ in SMALL.interactions if name == user]


async def ask(client: httpx2.AsyncClient, user: str, **params: Any) -> dict[str, Any]:
    """The answer of `GET /recommend/{user}`."""
    response = await client.get(f"/recommend/{quote(user, safe='')}", params=params)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def post(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a body."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(client: httpx2.AsyncClient, path: str, **body: Any) -> tuple[int, str]:
    """The status and the code with which a body is refused."""
    response = await client.post(path, json=body)
    assert response.headers["content-type"] == "application/problem+json", response.text
    return response.status_code, response.json()["code"]


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["id"] for item in answer["items"]]


def sources(answer: dict[str, Any]) -> list[str]:
    return [item["source"] for item in answer["items"]]


def serving(app: FastAPI) -> LoadedModel:
    """The model that is served."""
    model: LoadedModel | None = app.state.recommend.models.current
    assert model is not None
    return model


def margins_of(model: LoadedModel, user: str) -> dict[tuple[str, str], float]:
    """z_uij − z_uji of a known user and every two items, by the network itself in float64."""
    network = model.engine.model
    vector = network.user_vectors(torch.tensor([model.user_rows[user]])).double()
    rows = torch.arange(len(model.item_ids))
    i, j = torch.cartesian_prod(rows, rows).T
    users = vector.expand(len(i), -1)
    network = network.double()
    differences = (network.logits(users, i, j) - network.logits(users, j, i)).tolist()
    network.float()
    return dict(zip(product(model.item_ids, repeat=2), differences, strict=True))
