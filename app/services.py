"""Builds the features and wires them to each other. The one place that knows all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import sqlalchemy as sa

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.logging import get_logger
from app.core.metadata import instance
from app.core.migrations import ensure_schema
from app.core.settings import Settings
from app.core.shared import Shared
from app.events.service import EventService
from app.jobs.service import JobService
from app.keys.service import KeyService
from app.models.service import ModelRegistry
from app.models.store import store_of

log = get_logger(__name__)


@dataclass(slots=True)
class Services:
    """What endpoints, the worker and commands use. `await close()` when done."""

    settings: Settings
    database: Database
    catalog: CatalogService
    events: EventService
    models: ModelRegistry
    jobs: JobService
    keys: KeyService
    shared: Shared | None = None

    async def close(self) -> None:
        """Write what was accepted, then let go of everything."""
        try:
            async with asyncio.timeout(self.settings.drain_seconds / 3):
                await self.events.drain()
        except TimeoutError:
            log.error("events were still waiting when the time to drain was over")
        finally:
            if self.shared is not None:
                await self.shared.close()
            self.models.close()
            await self.database.close()


async def build_services(settings: Settings) -> Services:
    """Connect to the database, see to its schema, and start what runs in the background."""
    store = store_of(settings)
    database = Database(settings.effective_database_url)
    try:
        await ensure_schema(database)
    except BaseException:
        await database.close()
        raise
    database.log_start()
    catalog = CatalogService(database)
    events = EventService(database, catalog, settings)
    events.start()
    models = ModelRegistry(database, store)
    jobs = JobService(database, settings)
    keys = KeyService(database)
    shared = None
    if settings.redis_url is not None:
        # By the database's own name: two that share a Redis, or one and its restored copy, differ.
        name = (await database.fetch(sa.select(instance.c.instance_id)))[0][0]
        shared = Shared(settings.redis_url, f"{settings.redis_prefix}:{name}")
        shared.on_hint("events", events.profiles.hint)
        events.announce = lambda: shared.hint("events")
        models.announce = lambda: shared.hint("model")
        shared.start()
    return Services(settings, database, catalog, events, models, jobs, keys, shared)
