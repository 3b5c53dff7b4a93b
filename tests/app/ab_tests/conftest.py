"""A service with two trained versions, the second active."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from app.wiring import Services
from tests.app.trained_models import add_small_data, publish_model


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
    monkeypatch.setattr("app.core.recommendation_ids.time", clock)
