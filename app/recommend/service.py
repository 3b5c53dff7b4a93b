"""From a user to the answer of `GET /recommend/{user}`."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.core.recommendation_ids import new_recommendation_id
from app.inference.batcher import IsGone
from app.inference.model_manager import ModelManager
from app.recommend.ab_tests import ABTestRouter
from app.recommend.context import ContextLoader
from app.recommend.list_builder import ListBuilder
from app.recommend.response import response_body
from app.recommend.schemas import RecommendationQuery


class RecommendService:
    """Answers with the list of one user. ``ab_tests`` tries a second version beside the first."""

    def __init__(
        self,
        contexts: ContextLoader,
        models: ModelManager,
        lists: ListBuilder,
        ab_tests: ABTestRouter | None = None,
    ) -> None:
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
            Unavailable: too many requests wait to be ranked, or the client has gone.
        """
        started = time.perf_counter()
        context = await self._contexts.load(user, query, is_gone, on_slow)
        model = await self._models.get(query.model)
        version = None if model is None else model.version
        interleaved = None
        if self._ab_tests is not None and model is not None:
            interleaved = await self._ab_tests.interleave(context, model)
        if interleaved is not None:
            ranked, recommendation_id = interleaved
        else:
            ranked = await self._lists.build(context, model)
            recommendation_id = new_recommendation_id(version or "none")
            if self._ab_tests is not None and model is not None:
                self._ab_tests.record(context, model, ranked)
        as_of_seq = context.profile.event_seq
        return response_body(user, version, as_of_seq, ranked, started, recommendation_id)
