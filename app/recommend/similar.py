"""Items like an item."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

import numpy as np
import orjson

from app.catalog.view import Catalogue
from app.core.cache import ByteCache, SingleFlight
from app.core.errors import NotFound
from app.core.overload import Places
from app.recommend.popular import PopularList
from app.recommend.serving import ServingModel
from app.recommend.sources import Sources

MOST_USERS = 200  # of an item, the newest, whose other items are looked at
COUNTED_SECONDS = 60  # so long such a list is kept
MOST_AT_ONCE = 64  # lists that are being made

Found = list[tuple[int, float]]


class SimilarItems:
    """By the model, see `ItemSpace`. Where it does not know the item, or there is no model: the
    items that the same users took up, by the cosine of who did: of an item's newest 200 users U and
    another one's n users, both·/√(|U|·n).
    """

    def __init__(self, sources: Sources, popular: PopularList, cache_bytes: int) -> None:
        self._sources = sources
        self._popular = popular
        self._cache: ByteCache[Hashable, bytes] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, bytes] = SingleFlight()
        self._places = Places(MOST_AT_ONCE, "many items' likes are being looked for")

    async def similar(self, item: str, n: int) -> bytes:
        """The body of the answer: visible items alone, most alike first. 404 for no such item.

        Raises Unavailable where it is not kept and many are being made.
        """
        catalogue = await self._sources.catalog.catalogue()
        internal = catalogue.internal_ids.get(item)
        if internal is None or internal in catalogue.deleted:
            raise NotFound("there is no such item", code="unknown_item")
        model = self._sources.host.current
        row = -1
        if model is not None:
            row = int(model.rows(catalogue).at(np.array([internal]))[0])
        by: Hashable = int(time.time()) // COUNTED_SECONDS
        if model is not None and row >= 0:
            by = model.key  # a new item changes lists of the same version
        key = (by, internal, catalogue.seq, n)
        kept = self._cache.get(key)
        if kept is None:

            async def answer() -> bytes:
                with self._places.one():  # of all who ask for it together
                    if model is None or row < 0:
                        found = await self._taken_with(catalogue, internal, n)
                        return _body(catalogue, internal, None, found)
                    found = await _nearest(model, catalogue, row, n)
                    return _body(catalogue, internal, model.version, found)

            kept = await self._flights.run(key, answer)
            self._cache.put(key, kept, len(kept))
        return kept

    async def _taken_with(self, catalogue: Catalogue, internal: int, n: int) -> Found:
        events = self._sources.events
        users, both = await events.taken_with(internal, MOST_USERS)
        await self._popular.ranked(await events.last_seq())
        counts = self._popular.counts
        pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
        there = pairs[:, 0] < min(catalogue.size, len(counts))
        pairs = pairs[there & catalogue.visible[np.where(there, pairs[:, 0], 0)]]
        of_others = np.maximum(counts[pairs[:, 0]], pairs[:, 1])
        scores = pairs[:, 1] / np.sqrt(max(1, users) * np.maximum(1, of_others))
        order = np.lexsort((pairs[:, 0], -scores))[:n]
        return [(int(pairs[at, 0]), float(scores[at])) for at in order]


async def _nearest(model: ServingModel, catalogue: Catalogue, row: int, n: int) -> Found:
    rows = model.rows(catalogue)
    nearest = await asyncio.to_thread(lambda: model.space.nearest(row, rows.visible, n))
    return [(int(rows.internal[other]), score) for other, score in nearest]


def _body(catalogue: Catalogue, internal: int, version: str | None, found: Found) -> bytes:
    return orjson.dumps(
        {
            "item": catalogue.external_ids[internal],
            "model_version": version,
            "items": [
                {
                    "id": catalogue.external_ids[other],
                    "title": catalogue.titles[other],
                    "score": round(score, 6),
                }
                for other, score in found
            ],
        }
    )
