"""Questions to the service, and what is in its answers."""

from __future__ import annotations

from itertools import product
from typing import Any
from urllib.parse import quote

import httpx2
import torch
from fastapi import FastAPI

from app.inference.loaded_model import LoadedModel
from tests.app.conftest import SMALL

ITEMS = [item.id for item in SMALL.items]
GENRES = {item.id: item.genre for item in SMALL.items}
USERS = list(dict.fromkeys(user for user, _, _ in SMALL.interactions))


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
