"""Builds the services of all features and connects them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.ab_tests.impressions import ClickThroughStatistics, ImpressionBuffer
from app.ab_tests.interleaving import InterleavingTrials
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.service import ABTestService
from app.ab_tests.settings_trials import SettingsTrials
from app.ab_tests.shadow import ShadowTrials
from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.logging import get_logger
from app.core.migrations import ensure_schema
from app.core.redis import RedisClient
from app.core.settings import Settings
from app.core.tables import instance_id
from app.events.click_attribution import ClickAttribution
from app.events.event_weights import EventWeights
from app.events.group_commit import CommitObserver, ignore_commit
from app.events.service import EventService
from app.events.user_service import UserService
from app.jobs.service import JobService
from app.keys.service import KeyService
from app.registry.retention import RetentionRule
from app.registry.service import ModelRegistry, open_checkpoint_store
from app.webhooks.outbox import Outbox

log = get_logger(__name__)


@dataclass(slots=True)
class Services:
    """The services that endpoints, workers and commands use. Await `close()` when done."""

    settings: Settings
    database: Database
    catalog: CatalogService
    events: EventService
    users: UserService
    models: ModelRegistry
    jobs: JobService
    keys: KeyService
    trials: ABTestService
    redis: RedisClient | None = None

    async def close(self) -> None:
        """Write the accepted events, then close the services."""
        try:
            async with asyncio.timeout(self.settings.drain_seconds / 3):
                await self.events.drain()
        except TimeoutError:
            log.error("the drain time ended before all events were written")
        finally:
            await self.trials.close()
            if self.redis is not None:
                await self.redis.close()
            self.models.close()
            await self.database.close()


async def build_services(
    settings: Settings,
    *,
    observe_commit: CommitObserver = ignore_commit,
    may_migrate: bool = True,
) -> Services:
    """Connect to the database, check or migrate its schema, and start background tasks.

    Args:
        settings: the settings of the service.
        observe_commit: called after each group commit of events.
        may_migrate: migrate an SQLite database with an older schema instead of refusing it.
    """
    store = open_checkpoint_store(settings)
    database = Database(settings.effective_database_url)
    try:
        await ensure_schema(database, may_migrate=may_migrate)
    except BaseException:
        await database.close()
        raise
    database.log_start()
    redis = await _redis_client(settings, database)

    def announce(kind: str) -> None:
        if redis is not None:
            redis.hint(kind)

    clicks = ClickAttribution(database, EventWeights.from_settings(settings))
    impressions = ImpressionBuffer(database)
    click_through = ClickThroughStatistics(database, clicks, impressions)
    catalog = CatalogService(database, settings.filter_cache_bytes)
    models = ModelRegistry(
        database,
        store,
        RetentionRule(settings.keep_models, settings.keep_rejected_days),
        versions_in_use=ABTestRepository(database).versions_in_use,
        click_through=click_through.total,
        announce=lambda: announce("model"),
        outbox=Outbox.from_settings(settings),
    )
    trials = ABTestService(
        database,
        models,
        settings,
        impressions,
        click_through,
        InterleavingTrials(database, clicks, impressions),
        ShadowTrials(database, impressions),  # optional
        SettingsTrials(database, clicks, impressions),  # optional
    )
    events = EventService(
        database,
        catalog,
        settings,
        announce=lambda: announce("events"),
        on_erase=[trials.erase],
        observe_commit=observe_commit,
    )
    events.start()
    if redis is not None:
        redis.on_hint("events", events.profiles.hint)
        redis.start()
    jobs = JobService(database, settings, models.serving)
    keys = KeyService(database)
    users = UserService(
        database, announce=lambda: announce("events"), on_merge=[trials.merge_users]
    )
    return Services(settings, database, catalog, events, users, models, jobs, keys, trials, redis)


async def _redis_client(settings: Settings, database: Database) -> RedisClient | None:
    """A client whose keys contain the database's id, as several databases may share a Redis."""
    if settings.redis_url is None:
        return None
    name = await instance_id(database)
    return RedisClient(settings.redis_url, f"{settings.redis_prefix}:{name}")
