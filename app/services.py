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
from app.events.attribution import Attribution
from app.events.service import EventService
from app.jobs.chores import Chore
from app.jobs.service import JobService
from app.jobs.triggers import Triggers
from app.jobs.worker import Worker
from app.keys.service import KeyService
from app.models.retention import Rule
from app.models.service import ModelRegistry
from app.models.store import store_of
from app.trials.service import TrialService

log = get_logger(__name__)

TRIGGERS_SECONDS, CLEAN_SECONDS = 5.0, 600.0
TRIALS_SECONDS = 10.0
RETURN_SECONDS = 300.0  # what it looks at changes every hour
FORGET_SECONDS = 3600.0


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
    trials: TrialService
    shared: Shared | None = None

    async def close(self) -> None:
        """Write what was accepted, then let go of everything."""
        try:
            async with asyncio.timeout(self.settings.drain_seconds / 3):
                await self.events.drain()
        except TimeoutError:
            log.error("events were still waiting when the time to drain was over")
        finally:
            await self.trials.close()
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
    models = ModelRegistry(database, store, Rule(settings.keep_models, settings.keep_rejected_days))
    jobs = JobService(database, settings, models.serving)
    keys = KeyService(database)
    trials = TrialService(database, models, Attribution(database, events.feedback), settings)
    events.on_erase.append(trials.erase)
    models.about["click_through"] = trials.click_through
    models.in_use.append(trials.in_use)
    shared = None
    if settings.redis_url is not None:
        # By the database's own name: two that share a Redis, or one and its restored copy, differ.
        name = (await database.fetch(sa.select(instance.c.instance_id)))[0][0]
        shared = Shared(settings.redis_url, f"{settings.redis_prefix}:{name}")
        shared.on_hint("events", events.profiles.hint)
        events.announce = lambda: shared.hint("events")
        models.announce = lambda: shared.hint("model")
        shared.start()
    return Services(settings, database, catalog, events, models, jobs, keys, trials, shared)


def worker_of(services: Services) -> Worker:
    """A worker on these services, with what there is to be done beside jobs."""
    trials, models, settings = services.trials, services.models, services.settings
    triggers = Triggers(
        services.database, settings, services.jobs, services.events.last_seq, models.trained_seq
    )
    chores = [
        Chore("triggers", TRIGGERS_SECONDS, triggers.fire),
        Chore("clean", CLEAN_SECONDS, models.clean),
        Chore("trials", TRIALS_SECONDS, trials.end_outdated),
        Chore("return", RETURN_SECONDS, trials.return_check),
        Chore("forget", FORGET_SECONDS, trials.forget),
    ]
    return Worker(services.database, models, settings, chores)
