"""A service with two trained versions, the second active; and what A/B tests record of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.ab_tests.schemas import RunningABTest
from app.ab_tests.service import ABTestService
from app.all_tables import metadata
from app.core.ids import HOUR_MS
from app.wiring import Services
from tests.app.conftest import add_small_data, publish_model

URL = "/admin/trials"


def list_id(source: str, hour: int, number: int) -> str:
    """The id of a list that was served in the middle of an hour."""
    return f"{source}.{hour * HOUR_MS + HOUR_MS // 2:x}.{number:012x}"


async def click(services: Services, user: str, item: str, name: str, **more: Any) -> None:
    event = {"user": user, "item": item, "recommendation_id": name, **more}
    result = await services.events.add_rows([event], 0)
    assert result.accepted == 1, result.rejected


async def user_id(services: Services, user: str) -> int:
    found = (await services.events.profiles.get(user)).user_id
    assert found is not None
    return found


async def item_ids(services: Services, items: Sequence[str]) -> list[int]:
    known = (await services.catalog.catalogue()).internal_ids
    return [known[item] for item in items]


async def interleaved(
    services: Services,
    trial: RunningABTest,
    name: str,
    user: str | None,
    team_a: Sequence[str],
    team_b: Sequence[str],
) -> None:
    """Records an interleaved list."""
    services.trials.interleaving.record(
        name,
        trial,
        None if user is None else await user_id(services, user),
        await item_ids(services, team_a),
        await item_ids(services, team_b),
    )


def running(trials: ABTestService) -> RunningABTest:
    assert trials.interleaving.running is not None
    return trials.interleaving.running


async def rows(services: Services, table: str) -> list[Mapping[str, Any]]:
    """Everything in a table, in the order of its key."""
    columns = metadata.tables[table]
    query = sa.select(columns).order_by(*columns.primary_key)
    return [row._mapping for row in await services.database.fetch(query)]


async def execute(services: Services, *statements: sa.Executable) -> None:
    async with services.database.write() as conn:
        for statement in statements:
            await conn.execute(statement)


@pytest.fixture
async def versions(app: FastAPI) -> tuple[str, str]:
    """The one before, and the active one."""
    services: Services = app.state.services
    await add_small_data(services)
    first = await publish_model(services, seed=1)
    return first, await publish_model(services, seed=2)


@pytest.fixture
def served(app: FastAPI) -> Services:
    """The running application's services."""
    services: Services = app.state.services
    return services


@pytest.fixture
def one_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same hour from a test's beginning to its end."""
    now = time.time_ns()
    clock = SimpleNamespace(time_ns=lambda: now)
    monkeypatch.setattr("app.core.ids.time", clock)


async def begin(client: httpx2.AsyncClient, version: str, **more: Any) -> dict[str, Any]:
    body = {"kind": "interleaving", "version": version, "share": 1.0, **more}
    response = await client.post(URL, json=body)
    assert response.status_code == 201, response.text
    trial: dict[str, Any] = response.json()
    assert response.headers["location"] == f"{URL}/{trial['trial_id']}"
    return trial
