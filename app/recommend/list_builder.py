"""Whole lists: from the cache, else ranked by the model, then backfilled with popular items."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from app import __version__
from app.core.cache import ByteCache, SingleFlight
from app.core.redis import RedisClient
from app.inference.batcher import Batcher, ClientGone
from app.inference.loaded_model import LoadedModel
from app.recommend.context import (
    NEWCOMER,
    RecommendationContext,
    rank_request,
    source_of,
)
from app.recommend.exploration import Exploration
from app.recommend.popularity import PopularityRanking, backfill, boosted
from app.recommend.response import EMPTY_LIST, RankedList, shared_list_name


class ListBuilder:
    """Builds the list of a request.

    Args:
        batcher: ranks the lists that are in no cache.
        popularity: ranks the items of backfill and of newcomers' lists.
        exploration: draws a share of newcomers' items.
        cache_bytes: the memory for lists of this process, in bytes.
        redis: keeps lists for other servers, where there is one.
    """

    def __init__(
        self,
        batcher: Batcher,
        popularity: PopularityRanking,
        exploration: Exploration,
        cache_bytes: int = 0,
        redis: RedisClient | None = None,
    ) -> None:
        self._batcher = batcher
        self._popularity = popularity
        self._exploration = exploration
        self._redis = redis
        self.cache: ByteCache[Hashable, RankedList] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, RankedList] = SingleFlight()

    async def build(self, context: RecommendationContext, model: LoadedModel | None) -> RankedList:
        """The model's list with backfill; without a model, the popular items.

        Raises:
            Unavailable: too many requests wait to be ranked, or the client has gone.
        """
        query, user_key = context.query, context.user_key_by(model)
        ranked_by = None
        if model is not None:
            ranked_by = (model.key, model.gap_class(context.profile.timestamps, context.at_us))
        state = context.catalogue.shown_seq, context.catalogue.moment
        key = (ranked_by, user_key, state, context.query_key)
        ranked = EMPTY_LIST
        if user_key is NEWCOMER:
            if self._exploration.n_drawn(query) > 0:
                popular = await self._popularity.ranked(context.profile.event_seq)
                key_now = (key, self._popular_state(context))
                if not self._exploration.has(key_now):
                    popular = await boosted(context, self._popularity, popular)
                return self._exploration.build(
                    key_now, context, popular, self._popularity.counts, keep=context.is_kept
                )
        elif model is not None:
            # A change of an item that the model does not have changes no list of its own.
            items = model.items(context.catalogue)
            own = (ranked_by, user_key, (items.shown_seq, items.moment), context.query_key)
            cached = self.cache.get(own)
            while cached is None:
                self._batcher.check()  # before anything is done for a request that will be refused
                try:
                    # Requests for the same list wait for one computation.
                    cached = await self._flights.run(
                        own, partial(self._rank, own, context, model), context.on_slow
                    )
                except ClientGone:
                    # It may have been another's client who asked for the same list.
                    if context.is_gone is not None and await context.is_gone():
                        raise
            ranked = cached
        if len(ranked.ids) >= query.n:
            return ranked
        return ranked.followed_by(await self._backfill(key, context, ranked))

    async def _rank(
        self, key: Hashable, context: RecommendationContext, model: LoadedModel
    ) -> RankedList:
        """The model's list, kept in the caches; empty where the model does not know the user."""
        # Before anything is waited for: the model holds one index, and a request with a later state
        # of the catalogue would have it made anew.
        items = model.items(context.catalogue)
        if context.selection is not None:
            await context.selection.prepare(items.internal, model.engine.temperature)
        request = rank_request(context, model, items)
        if request is None:
            return EMPTY_LIST
        redis = self._redis if context.is_kept else None
        if redis is not None:
            # Servers of another version or setting may rank, describe or weigh in another way.
            made_by = (__version__, model.engine.n_candidates, context.profile.event_weights.key)
            # What a server takes for shown depends on the states of the catalogue that it has seen.
            name = shared_list_name((*made_by, context.catalogue.seq, key))
            shared = RankedList.from_bytes(await redis.get(name), context.catalogue)
            if shared is not None:
                self.cache.put(key, shared, shared.nbytes + context.query.key_bytes)
                return shared
        best = await self._batcher.rank(
            model.engine,
            request,
            context.is_gone,
            partial(self._flights.turn_slow, key),
            ready=model.engine.retriever.is_ready(request),
        )
        ranked = RankedList.ranked(
            context.catalogue,
            items.internal,
            source_of(request.user),
            best,
            explain=context.query.explain,
        )
        if context.is_kept:
            self.cache.put(key, ranked, ranked.nbytes + context.query.key_bytes)
        if redis is not None:
            redis.put(name, ranked.to_bytes())
        return ranked

    def _popular_state(self, context: RecommendationContext) -> int:
        """The state that the order of popular items depends on."""
        popularity = self._popularity
        return popularity.counts_number if context.query.boost else popularity.number

    async def _backfill(
        self, key: Hashable, context: RecommendationContext, ranked: RankedList
    ) -> RankedList:
        """The popular items that follow the model's own list."""
        popular = await self._popularity.ranked(context.profile.event_seq)
        key = (key, self._popular_state(context))
        rest = self.cache.get(key)
        if rest is None:
            popular = await boosted(context, self._popularity, popular)
            rest = backfill(context, popular, ranked)
            if context.is_kept:
                self.cache.put(key, rest, rest.nbytes + context.query.key_bytes)
        return rest
