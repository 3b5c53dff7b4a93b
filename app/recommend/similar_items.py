"""Items similar to an item: by the model, else by common users."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.service import CatalogService
from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache, SingleFlight
from app.core.errors import NotFound
from app.core.ids import new_recommendation_id
from app.core.middleware import ConcurrencyLimiter
from app.core.tables import now_us
from app.events.service import EventService
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.context import internal_ids
from app.recommend.cursor import MAX_PLACES, ListCursor, decode
from app.recommend.details import ItemDetails
from app.recommend.frozen_lists import FrozenList, FrozenLists
from app.recommend.left_out import LeftOut, LeftOutItems
from app.recommend.popularity import PopularityRanking
from app.recommend.schemas import RecommendationQuery
from app.recommend.selection import Selection, Selector

MAX_COMMON_USERS = 200  # of an item, the newest, whose other items are counted
COUNT_SECONDS = 60  # that a list by common users is kept for
MAX_CONCURRENT = 64  # lists that are being made
LENGTHS = (20, 100, 1_000)  # that lists are made of
SUBJECT = b"similar to %b%b"  # of cursors: an item, and whose items are left out
NO_ITEMS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

ScoredIds = list[tuple[int, float]]
"""The catalogue's ids with their similarity, the most similar first."""


class SimilarItemsService:
    """Finds similar items by the model (`ItemSpace`).

    Without a model, or for an item that the model does not know, the similarity is the cosine of
    the items' users. With the newest 200 users U of the item and the n users of another item, the
    cosine is |both| / √(|U|·n).

    The service calls ``on_list`` with the version of each answered list.
    """

    def __init__(
        self,
        catalog: CatalogService,
        events: EventService,
        models: ModelManager,
        popularity: PopularityRanking,
        frozen: FrozenLists[FrozenList],
        cache_bytes: int,
        on_list: Callable[[str], None] = lambda version: None,
    ) -> None:
        self._catalog = catalog
        self._selector = Selector(catalog)
        self._details = ItemDetails(catalog)
        self._events = events
        self._left_out = LeftOutItems(events)
        self._models = models
        self._popularity = popularity
        self._frozen = frozen
        self._on_list = on_list
        self._cache: ByteCache[Hashable, FrozenList] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, FrozenList] = SingleFlight()
        self._slots = ConcurrencyLimiter(
            MAX_CONCURRENT, "too many requests for similar items are in progress; retry later"
        )

    async def similar(
        self, item: str, query: RecommendationQuery, user: str | None, text: str | None
    ) -> bytes:
        """The body of the answer: visible items, the most similar first.

        Args:
            item: the client's id of the item.
            query: ``n``, the categories, the filter, the excluded items, and the details to show.
            user: the list leaves out this user's seen and disliked items by the query's rules.
            text: the cursor of the page before; None for the first page.

        Raises:
            NotFound: the item does not exist.
            Unprocessable: ``invalid_cursor``: the cursor is not from this list, or is too old; or
                the filter does not fit the attributes.
            Unavailable: the list is in no cache, and too many lists are being made.
        """
        profile = None if user is None else await self._events.profiles.get(user)
        catalogue = await self._catalog.catalogue(None if profile is None else profile.catalog_seq)
        internal = catalogue.internal_ids.get(item)
        if internal is None or internal in catalogue.deleted:
            raise NotFound("the item does not exist", code="unknown_item")
        left_out = np.array(internal_ids(catalogue, query.exclude), dtype=np.int64)
        left: LeftOut | None = None
        if user is not None and profile is not None:
            if self._left_out.has_rules(query):
                left = await self._left_out.of(user, profile, query, now_us())
            withheld = None if left is None else left.withheld
            parts = (profile.seen, profile.disliked) if withheld is None else (withheld,)
            hidden = NO_ITEMS if left is None else left.hidden
            left_out = np.concatenate([left_out, *parts, hidden])
        left_out = np.unique(left_out)
        selection = await self._selector.select(catalogue, query)
        allowed = catalogue.visible
        if selection is not None and selection.mask is not None:
            allowed = allowed & selection.mask.of(catalogue.size)
        if len(left_out):
            allowed = allowed.copy()
            allowed[left_out[left_out < len(allowed)]] = False
        subject = SUBJECT % (item.encode(), b"" if user is None else b" " + user.encode())
        cursor = None if text is None else decode(text, subject, query.list_digest)
        if cursor is None:
            whole = await self._whole(
                catalogue, internal, query, selection, query.n + len(left_out)
            )
            cursor = ListCursor(whole.version, 0, int(time.time()), NO_ITEMS)
        else:
            key = cursor.list_key(subject, query.list_digest)
            make = partial(self._whole, catalogue, internal, query, selection, MAX_PLACES)
            whole = await self._frozen.get(key, make)
        places = whole.places(allowed, cursor.shown)
        n = min(query.n, MAX_PLACES - len(cursor.shown))
        page, following = places[:n], None
        shown = whole.ids[page].tolist()
        if user is not None and profile is not None:
            self._left_out.remember(user, profile, left, shown)
        if len(places) > n or (len(page) == n and len(whole.ids) in LENGTHS[:-1]):
            after = cursor.after(shown)
            if len(after.shown) < MAX_PLACES:
                following = after.encode(subject, query.list_digest)
        if whole.version is not None:
            self._on_list(whole.version)
        details = await self._details.of(shown, query.include) if query.include else {}
        return orjson.dumps(
            {
                "recommendation_id": new_recommendation_id(whole.version or "none"),
                "item": item,
                "model_version": whole.version,
                "items": [
                    {
                        "id": catalogue.external_ids[other],
                        "title": catalogue.titles[other],
                        "score": round(score, 6),
                        **details.get(other, {}),
                    }
                    for other, score in zip(shown, whole.scores[page].tolist(), strict=True)
                ],
                "next_cursor": following,
            }
        )

    async def preview(
        self, item: str, n: int
    ) -> tuple[str | None, list[tuple[str, str | None, float]]]:
        """The version, and the id, title and similarity of ``n`` similar items.

        The list does not count as served. Raises as `similar`.
        """
        catalogue = await self._catalog.catalogue()
        internal = catalogue.internal_ids.get(item)
        if internal is None or internal in catalogue.deleted:
            raise NotFound("the item does not exist", code="unknown_item")
        whole = await self._whole(catalogue, internal, RecommendationQuery(n), None, n)
        page = whole.places(catalogue.visible, NO_ITEMS)[:n]
        shown = zip(whole.ids[page].tolist(), whole.scores[page].tolist(), strict=True)
        return whole.version, [
            (catalogue.external_ids[other], catalogue.titles[other], score)
            for other, score in shown
        ]

    async def _whole(
        self,
        catalogue: Catalogue,
        internal: int,
        query: RecommendationQuery,
        selection: Selection | None,
        n: int,
    ) -> FrozenList:
        """At least ``n`` similar items that fit the query, fewer only if no more exist.

        The list has at most 1,000 items.
        """
        model = self._models.current
        row = -1
        if model is not None:
            row = int(model.items(catalogue).rows(np.array([internal]))[0])
        state: Hashable = int(time.time()) // COUNT_SECONDS
        if model is not None and row >= 0:
            state = model.key  # a new item changes lists of the same version
        # Of a few lengths only: one is made for all requests that differ in ``n`` alone.
        length = next((length for length in LENGTHS if length >= n), LENGTHS[-1])
        about = None if selection is None else selection.state
        shown = catalogue.shown_seq, catalogue.moment
        key = (state, internal, shown, length, query.categories, about)
        found = self._cache.get(key)
        if found is None:

            async def find() -> FrozenList:
                within = catalogue.mask(query.categories) if query.categories else None
                if selection is not None and selection.mask is not None:
                    fits = selection.mask.of(catalogue.size)
                    within = fits if within is None else within & fits
                with self._slots.one():  # for all requests for this list together
                    if model is None or row < 0:
                        similar = await self._by_common_users(catalogue, internal, within, length)
                        return _frozen(None, similar)
                    similar = await _by_model(model, catalogue, row, within, length)
                    return _frozen(model.version, similar)

            found = await self._flights.run(key, find)
            self._cache.put(key, found, found.nbytes + query.key_bytes)
        return found

    async def _by_common_users(
        self, catalogue: Catalogue, internal: int, within: NDArray[np.bool_] | None, n: int
    ) -> ScoredIds:
        users, both = await self._events.co_occurrences(internal, MAX_COMMON_USERS)
        await self._popularity.ranked(await self._events.last_seq())
        counts = self._popularity.counts
        allowed = catalogue.visible if within is None else catalogue.visible & within
        pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
        known = pairs[:, 0] < min(catalogue.size, len(counts))
        pairs = pairs[known & allowed[np.where(known, pairs[:, 0], 0)]]
        other_users = np.maximum(counts[pairs[:, 0]], pairs[:, 1])
        scores = pairs[:, 1] / np.sqrt(max(1, users) * np.maximum(1, other_users))
        order = np.lexsort((pairs[:, 0], -scores))[:n]
        return [(int(pairs[i, 0]), float(scores[i])) for i in order]


async def _by_model(
    model: LoadedModel, catalogue: Catalogue, row: int, within: NDArray[np.bool_] | None, n: int
) -> ScoredIds:
    items, engine = model.items(catalogue), model.engine

    def find() -> list[tuple[int, float]]:
        allowed = items.visible
        if within is not None:
            allowed = np.zeros_like(items.visible)
            rows = np.flatnonzero(items.visible)
            allowed[rows] = within[items.internal[rows]]
        return engine.item_space.nearest(row, allowed, n)

    nearest = await asyncio.to_thread(find)
    return [(int(items.internal[other]), score) for other, score in nearest]


def _frozen(version: str | None, similar: ScoredIds) -> FrozenList:
    ids = np.array([other for other, _ in similar], dtype=np.int64)
    scores = np.array([score for _, score in similar], dtype=np.float64)
    return FrozenList(version, ids, scores, np.full(len(ids), np.nan), "model")
