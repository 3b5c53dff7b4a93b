"""The answer of `GET /recommend/{user}`, and the context of any answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.catalog.service import CatalogService
from app.core.errors import Conflict
from app.core.ids import new_recommendation_id
from app.core.tables import now_us
from app.events.service import EventService
from app.inference.batcher import IsGone
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.inference.precomputed import LIST_ITEMS, PrecomputedCandidates
from app.recommend.ab_tests import ABTestRouter
from app.recommend.basket import NOBODY, Basket, with_basket
from app.recommend.context import RecommendationContext
from app.recommend.details import ItemDetails
from app.recommend.left_out import LeftOutItems
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList, response_body, with_ignored
from app.recommend.schemas import RecommendationQuery
from app.recommend.selection import Selector

PLAIN = RecommendationQuery(LIST_ITEMS)


class ContextLoader:
    """Looks up the context of a request, once for each request."""

    def __init__(self, events: EventService, catalog: CatalogService) -> None:
        self._events = events
        self._catalog = catalog
        self._selector = Selector(catalog)
        self.left_out = LeftOutItems(events)

    async def load(
        self,
        user: str,
        query: RecommendationQuery,
        is_gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> RecommendationContext:
        """The context at this moment, with every committed event of the user (`ProfileCache`).

        Raises:
            Conflict: ``query.min_seq`` is not reached.
            Unprocessable: the filter does not fit the attributes.
        """
        profile = await self._events.profiles.get(user, query.min_seq)
        if query.min_seq is not None and profile.event_seq < query.min_seq:
            raise Conflict(
                f"seq {query.min_seq} does not exist yet; the last seq is {profile.event_seq}",
                code="seq_not_reached",
            )
        catalogue = await self._catalog.catalogue(profile.catalog_seq)
        context = RecommendationContext(user, query, profile, catalogue, is_gone, on_slow, now_us())
        if query.filter is not None or query.boost:
            context.selection = await self._selector.select(catalogue, query)
        if self.left_out.has_rules(query):
            context.left_out = await self.left_out.of(user, profile, query, context.at_us)
        return context

    def remember(self, context: RecommendationContext, ranked: RankedList) -> None:
        """Records a served list where the user's next lists depend on it."""
        self.left_out.remember(context.user, context.profile, context.left_out, ranked.ids)

    async def check(self, query: RecommendationQuery) -> None:
        """Refuses a filter or a boost that is invalid for every user.

        Raises as `Selector.select`.
        """
        if query.filter is not None or query.boost:
            await self._selector.select(await self._catalog.catalogue(), query)

    def add_basket(self, context: RecommendationContext, basket: Basket) -> list[str]:
        """Make a basket the user's latest events, and return its unknown items."""
        items, ignored = basket.resolve(context.catalogue)
        context.profile, context.basket = with_basket(context.profile, items, context.at_us)
        return ignored

    async def precomputed_list(
        self, user: str, query: RecommendationQuery, model: LoadedModel
    ) -> tuple[RankedList, int, int] | None:
        """The precomputed list, the seq up to which the list is complete, and the user's last seq.

        None where a list ranked now might differ. The method does not read the user's profile.
        """
        made_ahead = model.engine.retriever.precomputed
        if (
            not isinstance(made_ahead, PrecomputedCandidates)
            or user not in model.listed
            or query.key != PLAIN.key
            or query.model is not None
            or self.left_out.has_rules(query)
        ):
            return None
        event_seq, catalog_seq = await self._events.profiles.catch_up(query.min_seq)
        last_seq = self._events.profiles.last_seq(user)
        if last_seq is None or event_seq < (query.min_seq or 0):
            return None
        catalogue = await self._catalog.catalogue(catalog_seq)
        items = model.items(catalogue)
        best = made_ahead.find_list(user, last_seq, model, items, now_us())
        if best is None:
            return None
        ranked = RankedList.ranked(catalogue, items.internal, "model", best, explain=False)
        return ranked, event_seq, last_seq


class RecommendService:
    """Answers with the list of one user.

    Args:
        contexts: looks up the context of a request.
        models: the active version, and other versions by name.
        lists: builds the list.
        ab_tests: runs the A/B tests.
        on_list: called with the user and the query of each answer.
        details: reads the requested details of items.
    """

    def __init__(
        self,
        contexts: ContextLoader,
        models: ModelManager,
        lists: ListBuilder,
        ab_tests: ABTestRouter | None = None,
        on_list: Callable[[str, RecommendationQuery], None] = lambda user, query: None,
        *,
        details: ItemDetails,
    ) -> None:
        self._details = details
        self._on_list = on_list
        self._contexts = contexts
        self._models = models
        self._lists = lists
        self._ab_tests = ab_tests

    async def recommend(
        self,
        user: str,
        query: RecommendationQuery,
        is_gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> bytes:
        """The body of the answer, as JSON.

        Args:
            user: the client's id of the user.
            query: the parameters of the list.
            is_gone: tells whether the client has disconnected.
            on_slow: called when the answer has to wait in the slow queue.

        Raises:
            Conflict: ``min_seq`` is not reached, or the version's files are removed.
            NotFound: there is no such version.
            Unprocessable: the filter does not fit the attributes.
            Unavailable: too many requests wait to be ranked, or the client has gone.
        """
        started = time.perf_counter()
        model, tests, ahead = self._models.current, self._ab_tests, None
        version: str | None
        source: str | None
        if model is not None and user in model.listed and (tests is None or tests.is_idle):
            ahead = await self._contexts.precomputed_list(user, query, model)
        if ahead is not None and model is not None:
            ranked, as_of_seq, last_seq = ahead
            if tests is not None:
                tests.record(model.version)
            recommendation_id = new_recommendation_id(model.version)
            version = source = model.version
        else:
            context = await self._contexts.load(user, query, is_gone, on_slow)
            model, profile = self._models.current, context.profile
            as_of_seq, last_seq = profile.event_seq, profile.last_seq
            if query.model is not None:
                model = await self._models.get(query.model)
            ranked, recommendation_id, version, source = await self._serve(context, model)
            self._contexts.remember(context, ranked)
        self._on_list(user, query)
        following = ranked.cursor(query, user, source, last_seq)
        if query.include:
            ranked = await self._details.added(ranked, query.include)
        return response_body(
            user, version, as_of_seq, ranked, started, recommendation_id, following
        )

    async def _serve(
        self, context: RecommendationContext, model: LoadedModel | None
    ) -> tuple[RankedList, str, str | None, str | None]:
        """The fields of `ServedList`; without a model, the version and the source are None."""
        if model is None:
            return await self._lists.build(context, None), new_recommendation_id("none"), None, None
        if self._ab_tests is not None:
            return await self._ab_tests.build(context, model)
        ranked, version = await self._lists.build(context, model), model.version
        return ranked, new_recommendation_id(version), version, version

    async def recommend_for_basket(
        self,
        user: str | None,
        basket: Basket,
        query: RecommendationQuery,
        is_gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> bytes:
        """The body of an answer by a basket, and by the user's own events where there is a user.

        Raises as `recommend`.
        """
        started = time.perf_counter()
        context = await self._contexts.load(user or NOBODY, query, is_gone, on_slow)
        ignored = self._contexts.add_basket(context, basket)
        model = await self._models.get(query.model)
        ranked, recommendation_id, version, source = await self._serve(context, model)
        self._contexts.remember(context, ranked)
        as_of_seq = context.profile.event_seq
        following = ranked.cursor(
            query, context.user, source, context.profile.last_seq, context.basket
        )
        ranked = await self._details.added(ranked, query.include)
        body = response_body(
            user, version, as_of_seq, ranked, started, recommendation_id, following
        )
        return with_ignored(body, ignored)

    async def preview(
        self, user: str, query: RecommendationQuery
    ) -> tuple[RankedList, LoadedModel | None]:
        """The list that `recommend` would give, and the model of the list.

        The list does not count as served, and takes part in no trial. Raises as `recommend`.
        """
        context = await self._contexts.load(user, query)
        model = await self._models.get(query.model)
        return await self._lists.build(context, model), model
