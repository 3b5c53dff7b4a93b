"""Items similar to an item: by the model, else by their common users."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

import numpy as np

from app.catalog.filters import AttributeFilter
from app.catalog.service import CatalogService
from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache, SingleFlight
from app.core.errors import NotFound
from app.core.middleware import ConcurrencyLimiter
from app.events.service import EventService
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.details import ItemDetails
from app.recommend.popularity import PopularityRanking
from app.recommend.schemas import RecommendationQuery, SimilarItem, SimilarItems
from app.recommend.selection import Selection, Selector

MAX_COMMON_USERS = 200  # of an item, the newest, whose other items are counted
COUNT_SECONDS = 60  # that a list by common users is kept for
MAX_CONCURRENT = 64  # lists that are being made
LENGTHS = (20, 100, 1_000)  # that lists are made of
ITEM_BYTES = 500  # the memory of an item in a cached answer: its strings are the catalogue's

ScoredIds = list[tuple[int, float]]
"""The catalogue's ids with their similarity, the most similar first."""


class SimilarItemsService:
    """Finds similar items by the model (`ItemSpace`).

    Where the model does not know the item, or there is none, it is by the cosine of their users: of
    the newest 200 users U of the item and the n users of another, |both| / √(|U|·n).
    """

    def __init__(
        self,
        catalog: CatalogService,
        events: EventService,
        models: ModelManager,
        popularity: PopularityRanking,
        cache_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._selector = Selector(catalog)
        self._details = ItemDetails(catalog)
        self._events = events
        self._models = models
        self._popularity = popularity
        self._cache: ByteCache[Hashable, SimilarItems] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, SimilarItems] = SingleFlight()
        self._slots = ConcurrencyLimiter(
            MAX_CONCURRENT, "too many similar-item requests are under way; retry later"
        )

    async def similar(
        self,
        item: str,
        n: int,
        wanted: AttributeFilter | None = None,
        include: tuple[str, ...] = (),
    ) -> SimilarItems:
        """Visible items that fit a filter, the most similar first.

        Raises:
            NotFound: there is no such item.
            Unprocessable: the filter does not fit the attributes.
            Unavailable: the list is in no cache, and too many are being made.
        """
        catalogue = await self._catalog.catalogue()
        internal = catalogue.internal_ids.get(item)
        if internal is None or internal in catalogue.deleted:
            raise NotFound("there is no such item", code="unknown_item")
        model = self._models.current
        row = -1
        if model is not None:
            row = int(model.items(catalogue).rows(np.array([internal]))[0])
        state: Hashable = int(time.time()) // COUNT_SECONDS
        if model is not None and row >= 0:
            state = model.key  # a new item changes lists of the same version
        # Of a few lengths only: one is made for all requests that differ in ``n`` alone.
        length = next(length for length in LENGTHS if length >= n)
        query = RecommendationQuery(filter=wanted)
        selection = await self._selector.select(catalogue, query)
        about = None if selection is None else selection.state
        shown = catalogue.shown_seq, catalogue.moment
        key = (state, internal, shown, length, about)
        answer = self._cache.get(key)
        if answer is None:

            async def find() -> SimilarItems:
                with self._slots.one():  # for all requests for this list together
                    if model is None or row < 0:
                        similar = await self._by_common_users(
                            catalogue, internal, length, selection
                        )
                        return _answer(catalogue, internal, None, similar)
                    similar = await _by_model(model, catalogue, row, length, selection)
                    return _answer(catalogue, internal, model.version, similar)

            answer = await self._flights.run(key, find)
            self._cache.put(key, answer, ITEM_BYTES * (1 + len(answer.items)))
        if len(answer.items) > n:
            answer = answer.model_copy(update={"items": answer.items[:n]})
        if not include:
            return answer
        ids = [catalogue.internal_ids[one.id] for one in answer.items]
        details = await self._details.of(ids, include)
        items = [
            one.model_copy(update=details[internal_id])
            for one, internal_id in zip(answer.items, ids, strict=True)
        ]
        return answer.model_copy(update={"items": items})

    async def _by_common_users(
        self, catalogue: Catalogue, internal: int, n: int, selection: Selection | None
    ) -> ScoredIds:
        users, both = await self._events.co_occurrences(internal, MAX_COMMON_USERS)
        await self._popularity.ranked(await self._events.last_seq())
        counts = self._popularity.counts
        pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
        known = pairs[:, 0] < min(catalogue.size, len(counts))
        allowed = catalogue.visible
        if selection is not None and selection.mask is not None:
            allowed = allowed & selection.mask.of(catalogue.size)
        pairs = pairs[known & allowed[np.where(known, pairs[:, 0], 0)]]
        other_users = np.maximum(counts[pairs[:, 0]], pairs[:, 1])
        scores = pairs[:, 1] / np.sqrt(max(1, users) * np.maximum(1, other_users))
        order = np.lexsort((pairs[:, 0], -scores))[:n]
        return [(int(pairs[i, 0]), float(scores[i])) for i in order]


async def _by_model(
    model: LoadedModel, catalogue: Catalogue, row: int, n: int, selection: Selection | None
) -> ScoredIds:
    items, engine = model.items(catalogue), model.engine

    def find() -> list[tuple[int, float]]:
        allowed = items.visible
        if selection is not None and selection.mask is not None:
            allowed = allowed & selection.mask.rows(items.internal).mask
        return engine.item_space.nearest(row, allowed, n)

    nearest = await asyncio.to_thread(find)
    return [(int(items.internal[other]), score) for other, score in nearest]


def _answer(
    catalogue: Catalogue, internal: int, version: str | None, similar: ScoredIds
) -> SimilarItems:
    return SimilarItems(
        item=catalogue.external_ids[internal],
        model_version=version,
        items=[
            SimilarItem(
                id=catalogue.external_ids[other],
                title=catalogue.titles[other],
                score=round(score, 6),
            )
            for other, score in similar
        ],
    )
