"""Services of the tests of events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.core.settings import Settings
from app.wiring import Services, build_services

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
