"""Builds the features and wires them to each other. The one place that knows all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.logging import get_logger
from app.core.migrations import ensure_schema
from app.core.settings import Settings
from app.events.service import EventService
from app.jobs.service import JobService
from app.models.service import ModelRegistry

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

    async def close(self) -> None:
        """Write what was accepted, then let go of everything."""
        try:
            async with asyncio.timeout(self.settings.drain_seconds / 3):
                await self.events.drain()
        except TimeoutError:
            log.error("events were still waiting when the time to drain was over")
        finally:
            await self.database.close()


async def build_services(settings: Settings) -> Services:
    """Connect to the database, see to its schema, and start what runs in the background."""
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
    models = ModelRegistry(database, settings.data_dir)
    jobs = JobService(database, settings)
    return Services(settings, database, catalog, events, models, jobs)
