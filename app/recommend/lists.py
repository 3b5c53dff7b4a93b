"""Whole lists: a model's own, from the cache or ranked now, and what fills them up."""

from __future__ import annotations

from collections.abc import Hashable

from app import __version__
from app.core.cache import ByteCache, SingleFlight
from app.core.errors import Unavailable
from app.core.shared import Shared
from app.recommend.asking import NEWCOMER, Asked, request_of, source_of
from app.recommend.batcher import Batcher, ClientGone
from app.recommend.entries import (
    EMPTY,
    RankedList,
    decoded,
    digest_of,
    encoded,
    entry_of,
    listed,
)
from app.recommend.explain import reasons_told
from app.recommend.exploration import Exploration
from app.recommend.filling import popular_rest
from app.recommend.popular import PopularList
from app.recommend.serving import ServingModel


class Lists:
    """Ranked list from the cache, else from the model; then filled up with the popular."""

    def __init__(
        self,
        batcher: Batcher,
        popular: PopularList,
        cache_bytes: int = 0,
        shared: Shared | None = None,
        exploration: float = 0.0,
    ) -> None:
        self._batcher = batcher
        self._popular = popular
        self._shared = shared
        self.cache: ByteCache[Hashable, RankedList] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, RankedList] = SingleFlight()
        # Newcomers' lists differ, and there may be any number of them: only parts are kept.
        self._exploration = Exploration(exploration, cache_bytes // 16)

    async def of(self, asked: Asked, model: ServingModel | None) -> RankedList:
        """The list that a model gives; without one, the popular items."""
        state, version = asked.state, None if model is None else model.key
        key = (version, state, asked.catalogue.seq, asked.filters.key)
        found = EMPTY
        if state is NEWCOMER:
            if self._exploration.places(asked.filters.n) > 0:
                return await self._explored(key, asked)
        elif model is not None:
            found = self.cache.get(key) or await self._ranked(key, asked, model)
        if len(found.ids) >= asked.filters.n:
            return found
        return found.followed_by(await self._rest(key, asked, found))

    async def _ranked(self, key: Hashable, asked: Asked, model: ServingModel) -> RankedList:
        gone = asked.gone
        while True:
            self._batcher.check()  # before anything is done for a request that will be refused
            try:
                return await self._flights.run(key, lambda: self._personal(key, asked, model))
            except ClientGone:
                # It may have been another's client who asked for the same list.
                if gone is not None and await gone():
                    raise Unavailable("the client has gone", code="client_gone") from None

    async def _personal(self, key: Hashable, asked: Asked, model: ServingModel) -> RankedList:
        """The model's own list; empty where it knows nothing of the user."""
        request = request_of(asked, model)
        if request is None:
            return EMPTY
        name = None
        if self._shared is not None:
            # Servers of another version or setting may rank, describe or weigh in another way.
            made_by = (__version__, model.n_candidates, asked.profile.feedback.key)
            name = f"list:{digest_of((*made_by, key))}"
        if self._shared is not None and name is not None:
            found = decoded(await self._shared.get(name), asked.catalogue)
            if found is not None:
                self._keep(key, found, asked)
                return found
        source = source_of(request)
        ids = model.rows(asked.catalogue).internal
        ranked = await self._batcher.rank(model, request, asked.gone, asked.on_slow)
        reasons = reasons_told(asked.catalogue, ids, ranked) if asked.filters.explain else {}
        entries = [
            entry_of(
                asked.catalogue, int(ids[place.row]), rank, source, place, reasons.get(place.row)
            )
            for rank, place in enumerate(ranked, 1)
        ]
        found = listed(entries, [int(ids[place.row]) for place in ranked])
        self._keep(key, found, asked)
        if self._shared is not None and name is not None:
            self._shared.put(name, encoded(found))
        return found

    async def _rest(self, key: Hashable, asked: Asked, found: RankedList) -> RankedList:
        """What follows the model's own list: the popular items that are not in it."""
        popular = await self._popular.ranked(asked.profile.event_seq)
        key = (key, self._popular.number)
        kept = self.cache.get(key)
        if kept is None:
            kept = popular_rest(asked, popular, found)
            self._keep(key, kept, asked)
        return kept

    async def _explored(self, key: Hashable, asked: Asked) -> RankedList:
        """A newcomer's list, with a few places for items that are not popular yet."""
        popular = await self._popular.ranked(asked.profile.event_seq)
        key = (key, self._popular.number)
        return self._exploration.list_of(key, asked, popular, self._popular.counts)

    def _keep(self, key: Hashable, found: RankedList, asked: Asked) -> None:
        size = len(found.json) + 8 * len(found.ids) + asked.filters.key_bytes
        self.cache.put(key, found, size)
