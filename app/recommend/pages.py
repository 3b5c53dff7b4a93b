"""The next pages of a user's list: the places after a cursor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.core.errors import AppError, Unavailable
from app.core.ids import new_recommendation_id
from app.inference.batcher import Batcher, IsGone
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.ab_tests import ABTestRouter
from app.recommend.basket import NOBODY, Basket
from app.recommend.context import RecommendationContext, rank_request
from app.recommend.cursor import MAX_PLACES, decode
from app.recommend.details import ItemDetails
from app.recommend.frozen_lists import FrozenList, FrozenLists
from app.recommend.list_builder import ListBuilder
from app.recommend.popularity import backfill_items
from app.recommend.response import Entry, RankedList, reasons, response_body, with_ignored
from app.recommend.schemas import RecommendationQuery
from app.recommend.service import ContextLoader
from app.recommend.settings_tests import arm_query
from ncr_core.inference.retrieval import ItemFilter


class PageService:
    """Makes the next page of a list after a cursor.

    The second page ranks the list once more, to its end, with the version and the events of the
    first page. The service keeps the list as a `FrozenList`, and later pages are parts of it. Pages
    skip the items that the user has seen or that were hidden since then. Where the version is gone,
    the active version ranks. In either case, pages leave out the items that the cursor names.
    """

    def __init__(
        self,
        contexts: ContextLoader,
        models: ModelManager,
        lists: ListBuilder,
        batcher: Batcher,
        frozen: FrozenLists[FrozenList],
        ab_tests: ABTestRouter | None = None,
        *,
        details: ItemDetails,
    ) -> None:
        self._contexts = contexts
        self._models = models
        self._lists = lists
        self._batcher = batcher
        self._frozen = frozen
        self._ab_tests = ab_tests
        self._details = details

    async def page(
        self,
        user: str | None,
        query: RecommendationQuery,
        text: str,
        is_gone: IsGone | None = None,
        basket: Basket | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> bytes:
        """The body of the answer: the next ``query.n`` places after the cursor in ``text``.

        Raises:
            Unprocessable: ``invalid_cursor``: the cursor is not from this list, or is too old.
            Conflict: ``min_seq`` is not reached.
            Unavailable: too many requests wait to be ranked, or the client has gone.
        """
        started = time.perf_counter()
        context = await self._contexts.load(user or NOBODY, query, is_gone, on_slow)
        ranked_from = context.profile
        ignored: list[str] | None = None
        if basket is not None:
            ignored = self._contexts.add_basket(context, basket)
        cursor = decode(text, context.subject, query.list_digest)
        version, arm = cursor.version, None
        if version is not None and self._ab_tests is not None:
            arm = await self._ab_tests.find_arm(version)
        if arm is not None:
            version = arm.version
            context.query = arm_query(query, arm.settings)

        async def rank() -> FrozenList:
            if on_slow is not None:
                on_slow()
            profile = ranked_from.until(cursor.last_seq)
            whole = replace(context.query, n=MAX_PLACES, page=query.n, explain=False)
            at_us = cursor.at * 1_000_000
            then = replace(
                context,
                query=whole,
                profile=profile,
                basket=b"",
                at_us=at_us,
                left_out=await self._contexts.left_out.of(
                    context.user, profile, whole, at_us, rewound=True
                ),
                is_gone=None,  # others may wait for the same list
                on_slow=None,
            )
            if basket is not None:
                self._contexts.add_basket(then, basket)
            model = await self._model_of(version)
            ranked_by = None if model is None else model.version
            return FrozenList.of(ranked_by, await self._lists.build(then, model))

        frozen = await self._frozen.get(cursor.list_key(context.subject, query.list_digest), rank)
        places = frozen.places(backfill_items(context), cursor.shown)
        n = min(query.n, MAX_PLACES - len(cursor.shown))
        page, first = places[:n], len(cursor.shown) + 1
        entries = frozen.entries(page, context.catalogue, first)
        if query.explain:
            await self._explain(context, frozen, page, entries)
        following = None
        if len(places) > n and n == query.n and len(cursor.shown) + n < MAX_PLACES:
            cursor = cursor.after(frozen.ids[page].tolist())
            following = cursor.encode(context.subject, query.list_digest)
        recommendation_id = None
        if self._ab_tests is not None and frozen.version is not None:
            recommendation_id = self._ab_tests.record_page(arm, context.user, frozen.version)
        ranked = RankedList.of(entries, frozen.ids[page].tolist())
        self._contexts.remember(context, ranked)
        body = response_body(
            user,
            frozen.version,
            cursor.last_seq,
            await self._details.added(ranked, query.include),
            started,
            recommendation_id or new_recommendation_id(frozen.version or "none"),
            following,
        )
        return body if ignored is None else with_ignored(body, ignored)

    async def _model_of(self, version: str | None) -> LoadedModel | None:
        """The version that ranked the first page; the active version where that one is gone."""
        if version is None:
            return None
        try:
            return await self._models.get(version)
        except Unavailable:
            raise  # it is being loaded: the order of another one would stay
        except AppError:
            return self._models.current

    async def _explain(
        self,
        context: RecommendationContext,
        frozen: FrozenList,
        page: NDArray[np.int64],
        entries: list[Entry],
    ) -> None:
        """Adds the reasons for the places of a page, by the user's current profile."""
        for entry in entries:
            entry["because"] = []
        ids = frozen.ids[page[~np.isnan(frozen.scores[page])]]
        model = await self._model_of(frozen.version)
        request = None if model is None or not len(ids) else rank_request(context, model)
        if model is None or request is None:
            return
        items = model.items(context.catalogue)
        request = replace(
            request,
            n=len(ids),
            items=ItemFilter(request.items.allowed, within=[ids], row_of=items.row_of),
            diversity=0.0,
            key=None,
            trained_key=None,
        )
        best = await self._batcher.rank(model.engine, request, context.is_gone, ready=False)
        because = {
            int(items.internal[item.row]): reasons(context.catalogue, items.internal, item)
            for item in best
        }
        for place, entry in zip(page.tolist(), entries, strict=True):
            entry["because"] = because.get(int(frozen.ids[place]), [])
