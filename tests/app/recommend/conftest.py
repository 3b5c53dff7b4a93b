"""The running application with data and a model."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from app.services import Services
from tests.app.models import add_small_data, publish_model


@pytest.fixture
async def filled(app: FastAPI) -> Services:
    """With 60 users and 50 items, and no model."""
    services: Services = app.state.services
    await add_small_data(services)
    return services


@pytest.fixture
async def trained(app: FastAPI, filled: Services) -> str:
    """With a model that is served, too: its version."""
    version = await publish_model(filled, epochs=5)
    await app.state.recommend.host.refresh()
    return version
