"""Items of a request: ranked for a user, or compared with each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.core.errors import Conflict, Unprocessable
from app.core.ids import new_recommendation_id
from app.inference.batcher import Batcher, IsGone
from app.inference.model_manager import ModelManager
from app.recommend.ab_tests import ABTestRouter
from app.recommend.context import RecommendationContext, source_of, user_state
from app.recommend.details import ItemDetails
from app.recommend.popularity import PopularityRanking
from app.recommend.response import (
    RankedList,
    popular_entry,
    ranked_entry,
    response_body,
)
from app.recommend.schemas import Comparison, RecommendationQuery
from app.recommend.service import ContextLoader
from ncr_core.inference.engine import RankedItem, RerankRequest
from ncr_core.inference.retrieval import UserState


class RerankService:
    """Ranks and compares given items, each item once at its first position, without a cache."""

    def __init__(
        self,
        contexts: ContextLoader,
        models: ModelManager,
        popularity: PopularityRanking,
        batcher: Batcher,
        ab_tests: ABTestRouter | None = None,
        *,
        details: ItemDetails,
    ) -> None:
        self._details = details
        self._contexts = contexts
        self._models = models
        self._popularity = popularity
        self._batcher = batcher
        self._ab_tests = ab_tests

    async def rerank(
        self,
        user: str,
        items: Sequence[str],
        query: RecommendationQuery,
        is_gone: IsGone | None = None,
    ) -> bytes:
        """The body of the answer: all given items, in the order of the user's preference.

        With a filter, the answer has the items that fit. An unknown item has no attributes.

        Items that the model knows come first, by Algorithm 1 over these items in the order given
        (for many items, see `InferenceEngine.rerank`). The other items follow in the order given.
        Seen, disliked and hidden items stay, because the caller chose them. For a user whom the
        model does not know, the order is by popularity.
        """
        started = time.perf_counter()
        context = await self._contexts.load(user, query, is_gone)
        model = await self._models.get(query.model)
        items = list(dict.fromkeys(items))
        ids = _internal_ids(context.catalogue, items)
        if context.selection is not None:
            fitting = context.selection.fitting(ids, context.catalogue.size)
            items, ids = [items[position] for position in fitting], ids[fitting]
        state = None if model is None else user_state(context, model)
        ranked: list[tuple[int, RankedItem | None]]  # positions among the items
        if model is None or state is None:
            ranked = [(position, None) for position in await self._by_popularity(ids, context)]
        else:
            rows = model.items(context.catalogue).rows(ids)
            known = np.flatnonzero(rows >= 0)
            position_of = dict(zip(rows[known].tolist(), known.tolist(), strict=True))
            best: list[RankedItem] = []
            if len(known):
                boost = None
                if context.selection is not None:
                    internal = model.items(context.catalogue).internal
                    await context.selection.prepare(internal, model.engine.temperature)
                    boost = context.selection.boost(internal, model.engine.temperature)
                request = RerankRequest(state, rows[known], boost)
                best = await self._batcher.rerank(model.engine, request, is_gone)
            ranked = [(position_of[item.row], item) for item in best]
            ranked += [(position, None) for position in np.flatnonzero(rows < 0).tolist()]
        entries = []
        for rank, (position, item) in enumerate(ranked, 1):
            internal_id = int(ids[position])
            if item is not None:
                source = source_of(state)
                entries.append(ranked_entry(context.catalogue, internal_id, rank, source, item))
            else:
                title = None if internal_id < 0 else context.catalogue.titles[internal_id]
                entries.append(popular_entry(items[position], title, rank))
        version = None if model is None else model.version
        if self._ab_tests is not None and version is not None:
            self._ab_tests.record(version)
        answered = RankedList.of(entries, [int(ids[position]) for position, _ in ranked])
        return response_body(
            user,
            version,
            context.profile.event_seq,
            await self._details.added(answered, query.include),
            started,
            new_recommendation_id(version or "none"),
            None,
        )

    async def compare(
        self,
        user: str,
        items: Sequence[str],
        query: RecommendationQuery,
        is_gone: IsGone | None = None,
    ) -> Comparison:
        """The probability that the user prefers each item to each other item.

        For a user whom the model does not know, the probabilities are those of the mean user, and
        ``source`` is `popular`.

        Raises:
            Unprocessable: the model does not know one of the items.
            Conflict: no model is active.
        """
        context = await self._contexts.load(user, query, is_gone)
        model = await self._models.get(query.model)
        if model is None:
            raise Conflict("no model is active", code="no_model")
        items = list(dict.fromkeys(items))
        rows = model.items(context.catalogue).rows(_internal_ids(context.catalogue, items))
        if (rows < 0).any():
            first = items[int((rows < 0).argmax())]
            raise Unprocessable(f"the model does not know {first!r:.80}", code="item_not_ranked")
        state = user_state(context, model)
        request = RerankRequest(state or UserState(), rows)
        comparison = await self._batcher.compare(model.engine, request, is_gone)
        return Comparison(
            user=user,
            model_version=model.version,
            as_of_seq=context.profile.event_seq,
            source=source_of(state),
            items=items,
            probability=_symmetric(comparison.probability).tolist(),
            order=[items[position] for position in comparison.order],
        )

    async def _by_popularity(
        self, ids: NDArray[np.int64], context: RecommendationContext
    ) -> list[int]:
        """Positions by the number of the items' users, most first, ties in the order given.

        With boosts, the order is by log(users + 1) plus the boosts.
        """
        await self._popularity.ranked(context.profile.event_seq)
        counts = self._popularity.counts
        counted = (ids >= 0) & (ids < len(counts))
        users = np.zeros(len(ids), dtype=np.int64)
        users[counted] = counts[ids[counted]]
        scores: NDArray[np.floating] = users.astype(np.float64)
        if context.selection is not None and context.selection.boosts is not None:
            scores = np.log1p(users) + context.selection.boosts.at(ids, context.catalogue.size)
        order: list[int] = np.argsort(-scores, kind="stable").tolist()
        return order


def _internal_ids(catalogue: Catalogue, items: Sequence[str]) -> NDArray[np.int64]:
    """(k,) the catalogue's ids of the items, −1 for unknown items."""
    return np.array([catalogue.internal_ids.get(item, -1) for item in items], dtype=np.int64)


def _symmetric(probability: NDArray[np.floating]) -> NDArray[np.float64]:
    """(k, k) probabilities, rounded so that P(i over j) + P(j over i) = 1 still holds."""
    upper = np.triu(np.round(probability.astype(np.float64), 6), 1)
    lower = np.tril(np.round(1.0 - upper.T, 6), -1)
    return upper + lower + 0.5 * np.eye(len(upper))
