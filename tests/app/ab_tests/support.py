"""Clicks, interleaved lists and rows for tests of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from app.ab_tests.schemas import RunningABTest
from app.ab_tests.service import ABTestService
from app.all_tables import metadata
from app.core.recommendation_ids import HOUR_MS
from app.wiring import Services


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
