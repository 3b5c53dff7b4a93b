"""Everything that answers requests for lists, put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from app.catalog.service import CatalogService
from app.core.cache import ByteCache
from app.core.settings import Settings
from app.core.shared import Shared
from app.events.service import EventService
from app.models.service import ModelRegistry
from app.recommend.batch import BatchService
from app.recommend.batcher import Batcher
from app.recommend.entries import RankedList
from app.recommend.given_service import GivenService
from app.recommend.lists import Lists
from app.recommend.metrics import RankerMetrics
from app.recommend.model_host import ModelHost
from app.recommend.new_items import NewItems
from app.recommend.popular import PopularList
from app.recommend.questions import QuestionService
from app.recommend.service import RecommendService
from app.recommend.serving import ServingModel
from app.recommend.similar import SimilarItems
from app.recommend.sources import Sources
from app.recommend.trying import Trying
from app.trials.service import TrialService


class Recommending:
    """The parts, wired to each other. `await start()` before the first answer where the active
    model is to be followed; `await stop()` at the end.
    """

    def __init__(
        self,
        events: EventService,
        catalog: CatalogService,
        registry: ModelRegistry,
        settings: Settings,
        *,
        trials: TrialService | None = None,
        shared: Shared | None = None,
        metrics: RankerMetrics | None = None,
        on_model: Callable[[ServingModel], None] = lambda model: None,
    ) -> None:
        cache_bytes = settings.list_cache_bytes
        new_items = NewItems(events, catalog, settings.new_item_users)
        self.host = ModelHost(registry, settings, on_model, metrics, new_items)
        self.batcher = Batcher(settings.inference_threads, metrics)
        self.sources = Sources(events, catalog, self.host)
        popular = PopularList(events)
        self._lists = Lists(self.batcher, popular, cache_bytes, shared, settings.exploration)
        self.trying = None
        if trials is not None:
            self.trying = Trying(trials, self.host, self._lists, self.batcher)
        self.service = RecommendService(self.sources, self._lists, self.trying)
        self.batch = BatchService(self.sources, self.service)
        self.given = GivenService(self.sources, popular, self.batcher, self.trying)
        self.questions = QuestionService(self.sources, popular, self.batcher)
        self.similar = SimilarItems(self.sources, popular, cache_bytes // 16)

    @property
    def lists(self) -> ByteCache[Hashable, RankedList]:
        """Lists that are ready to be sent."""
        return self._lists.cache

    async def start(self) -> None:
        """Loads the active model, if there is one, and begins to follow the registry."""
        await self.host.start()

    async def stop(self) -> None:
        """Ends what runs in the background, and the inference thread."""
        if self.trying is not None:
            await self.trying.stop()
        await self.host.stop()
        await self.batcher.close()
