"""The service, built for a test: on either database, without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI

from app.core.database import Database
from app.core.redis import RedisClient
from app.core.settings import Settings, load_settings, normalise_database_url
from app.main import create_app
from app.wiring import Services, build_services
from tests.app.trained_models import add_small_data, publish_model
from tests.app.waiting import until


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings for a database of the test's own. Tests refresh the model when they want it."""
    return load_settings(
        data_dir=tmp_path,
        database_url=database_url,
        event_group_ms=1,
        precompute_users=0,
        model_poll_seconds=600,
    )


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The migrated database by itself."""
    database = Database(normalise_database_url(database_url))
    yield database
    await database.close()


@pytest.fixture
async def empty(empty_database_url: str) -> AsyncIterator[Database]:
    """A database without a schema."""
    database = Database(normalise_database_url(empty_database_url))
    yield database
    await database.close()


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[Services]:
    """The features without the web."""
    services = await build_services(settings)
    yield services
    await services.close()


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[FastAPI]:
    """The running application."""
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the running application."""
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def redis(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisClient]:
    """A server's end of what servers share, connected."""
    redis = RedisClient(redis_url, redis_prefix)
    redis.start()
    await until(lambda: redis.available)
    yield redis
    await redis.close()


def client_of(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    """A client with headers of its own."""
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://testserver", headers=headers
    )


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
    await app.state.recommend.models.refresh()
    return version
