"""Builds the feature that answers requests for lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.ab_tests.service import ABTestService
from app.catalog.service import CatalogService
from app.core.redis import RedisClient
from app.core.settings import Settings
from app.events.service import EventService
from app.inference.batcher import Batcher
from app.inference.loaded_model import LoadedModel
from app.inference.metrics import InferenceMetrics
from app.inference.model_manager import ModelManager
from app.inference.new_items import NewItems
from app.recommend.ab_tests import ABTestRouter
from app.recommend.batch import BatchService
from app.recommend.bulk_lists import BulkLists
from app.recommend.details import ItemDetails
from app.recommend.exploration import Exploration
from app.recommend.frozen_lists import FrozenCounts, FrozenList, FrozenLists
from app.recommend.list_builder import ListBuilder
from app.recommend.pages import PageService
from app.recommend.popularity import PopularityRanking
from app.recommend.preference_elicitation import QuestionService
from app.recommend.recent_popularity import RecentPopularity
from app.recommend.rerank import RerankService
from app.recommend.service import ContextLoader, RecommendService
from app.recommend.settings_tests import SettingsTester
from app.recommend.shadow_tests import ShadowTester
from app.recommend.similar_items import SimilarItemsService
from app.recommend.warm_up import WarmUp
from app.recommend.what_if import WhatIfService
from app.registry.service import ModelRegistry
from ncr_core.errors import CheckpointError


class RecommendFeature:
    """The services of the recommend routes, wired to each other.

    Await `start` before the first answer to follow the active model, and `stop` at the end.
    """

    def __init__(
        self,
        events: EventService,
        catalog: CatalogService,
        registry: ModelRegistry,
        settings: Settings,
        *,
        ab_tests: ABTestService | None = None,
        redis: RedisClient | None = None,
        metrics: InferenceMetrics | None = None,
        on_model: Callable[[LoadedModel], None] = lambda model: None,
    ) -> None:
        self._catalog, self._settings = catalog, settings
        cache_bytes = settings.list_cache_bytes
        self._new_items = new_items = NewItems(events, catalog, settings.new_item_users)
        self._contexts = contexts = ContextLoader(events, catalog)
        self.popularity = popularity = PopularityRanking(events)
        # Newcomers' lists differ, and there may be any number of them: only parts are kept.
        exploration = Exploration(settings.exploration, cache_bytes // 16)
        self.batcher = batcher = Batcher(settings.inference_threads, metrics)
        self.lists = lists = ListBuilder(batcher, popularity, exploration, cache_bytes, redis)
        self.warm_up = WarmUp(contexts, lists)
        self.models = models = ModelManager(
            registry,
            settings,
            on_model,
            metrics,
            new_items,
            self.warm_up.run,
            events.profiles.follow,
        )
        self.shadows: ShadowTester | None = None
        self.ab_tests: ABTestRouter | None = None
        if ab_tests is not None:
            if ab_tests.shadow is not None:
                self.shadows = ShadowTester(ab_tests.shadow, models, lists, batcher)
            settings_tester = None
            if ab_tests.settings_trials is not None:
                settings_tester = SettingsTester(ab_tests.settings_trials, models, lists)
            self.ab_tests = ABTestRouter(ab_tests, models, lists, self.shadows, settings_tester)
        details = ItemDetails(catalog)
        self.service = RecommendService(
            contexts, models, lists, self.ab_tests, self.warm_up.record, details=details
        )
        frozen = FrozenLists(FrozenList, cache_bytes // 16, redis)
        self.pages = PageService(
            contexts, models, lists, batcher, frozen, self.ab_tests, details=details
        )
        self.batch = BatchService(models, self.service, contexts)
        self.rerank = RerankService(
            contexts, models, popularity, batcher, self.ab_tests, details=details
        )
        self.questions = QuestionService(contexts, models, popularity, batcher)
        counts = FrozenLists(FrozenCounts, cache_bytes // 64, redis)
        self.recent = RecentPopularity(events, catalog, popularity, counts)
        self.what_if = WhatIfService(contexts, models, batcher)
        on_list = (lambda version: None) if self.ab_tests is None else self.ab_tests.record
        self.similar = SimilarItemsService(
            catalog, events, models, popularity, frozen, cache_bytes // 16, on_list
        )

    async def start(self) -> None:
        """Loads the active model, if any, follows the registry, and counts the users of items."""
        await asyncio.gather(self.models.start(), self.popularity.start())
        catalogue = await self._catalog.catalogue()  # now, and not while the first requests wait
        if self.models.current is not None:
            self.models.current.items(catalogue)

    async def bulk_lists(self) -> BulkLists:
        """The builder of many users' lists by the active model, with items newer than the model.

        Raises:
            CheckpointError: the active version cannot be loaded.
        """
        if self.models.current is None and self.models.refused is not None:
            raise CheckpointError(self.models.refused)
        if self._settings.new_items_seconds > 0:
            await self.models.add_new_items(self._new_items)
        return BulkLists(self._contexts, self.lists, self.models.current)

    async def stop(self) -> None:
        """Ends the background tasks and the inference threads."""
        if self.ab_tests is not None:
            await self.ab_tests.stop()
        await self.models.stop()
        await self.popularity.stop()
        await self.recent.stop()
        await self.batcher.close()
