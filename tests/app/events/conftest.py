"""Services and builders of events and preferences."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from app.core.settings import Settings
from app.events.schemas import AppendResult, NewEvent
from app.wiring import Services, build_services

DAY = 86_400_000_000  # microseconds

_numbers = count(1)


def event(
    user: str, item: str, kind: str = "click", value: float | None = None, day: float = 0
) -> NewEvent:
    """Return an event with an id of its own, so many days after 1970."""
    return NewEvent(f"e{next(_numbers)}", user, item, kind, value, int(day * DAY))


async def add(services: Services, *events: NewEvent) -> AppendResult:
    """Add events through the group commit."""
    return await services.events.group_commit.submit(events)


async def prefer(services: Services, *pairs: str, user: str = "u", at: int = 0) -> None:
    """Add preferences, each a string of the names of winner and loser."""
    rows = [{"user": user, "winner": p[0], "loser": p[1], "timestamp": at + 1} for p in pairs]
    result = await services.events.add_preferences(rows, 0)
    assert not result.rejected


async def item_names(services: Services, ids: Any) -> list[str]:
    """Return the client's ids of an array of internal ids."""
    names = await services.catalog.external_ids_of(set(ids.flatten().tolist()))
    return [names[item] for item in ids.flatten().tolist()]


FEEDBACK = """{"purchase": 3, "click": 1, "view": "seen", "dislike": -2,
    "rating": [{"from": 4, "weight": 1}, {"from": 3, "weight": "seen"}, {"weight": -1}]}"""


@pytest.fixture
async def other(settings: Settings, services: Services) -> AsyncIterator[Services]:
    """Another server on the same database."""
    other = await build_services(settings)
    yield other
    await other.close()


@pytest.fixture
async def weighted(settings: Settings) -> AsyncIterator[Services]:
    """Services with event weights by type and value, which halve in 10 days."""
    changed = {"feedback": FEEDBACK, "feedback_half_life_days": 10.0}
    services = await build_services(settings.model_copy(update=changed))
    yield services
    await services.close()
