"""From a user to the list that they get."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.recommend.batcher import IsGone
from app.recommend.entries import RankedList, answer_of, new_recommendation_id
from app.recommend.filters import Filters
from app.recommend.lists import Lists
from app.recommend.sources import Sources
from app.recommend.trying import Trying


class RecommendService:
    """Profile → model → list → answer. ``trying`` is for trials of a second version."""

    def __init__(self, sources: Sources, lists: Lists, trying: Trying | None = None) -> None:
        self._sources = sources
        self._lists = lists
        self._trying = trying

    async def recommend(
        self,
        user: str,
        filters: Filters,
        gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> bytes:
        """The body of the answer, as JSON. ``gone`` tells whether the client is; ``on_slow`` is
        told when the answer will have to wait for those that take long.
        """
        started = time.perf_counter()
        asked = await self._sources.ask(user, filters, gone, on_slow)
        model = await self._sources.model(filters.model)
        version = None if model is None else model.version
        found: RankedList | None = None
        recommendation_id: str | None = None
        if self._trying is not None and model is not None:
            trial = self._trying.interleaving_for(asked, model)
            if trial is not None:
                found, recommendation_id = await self._trying.interleaved(trial, asked, model)
        if found is None:
            found = await self._lists.of(asked, model)
        if recommendation_id is None:
            recommendation_id = new_recommendation_id(version)
            if self._trying is not None and model is not None:
                self._trying.served(asked, model, found)
        return answer_of(
            user, version, asked.profile.event_seq, found.json, started, recommendation_id
        )
