"""The list that a user would get after a positive event, without storing the event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from app.core.errors import Conflict, NotFound
from app.events.profile import Profile
from app.events.schemas import DEFAULT_TYPE
from app.inference.batcher import Batcher
from app.inference.model_manager import ModelManager
from app.recommend.context import rank_request, source_of
from app.recommend.response import EMPTY_LIST, RankedList
from app.recommend.schemas import RecommendationQuery
from app.recommend.service import ContextLoader


class WhatIfService:
    """Ranks for a profile with one more event, without keeping the profile or the list."""

    def __init__(self, contexts: ContextLoader, models: ModelManager, batcher: Batcher) -> None:
        self._contexts = contexts
        self._models = models
        self._batcher = batcher

    async def recommend(self, user: str, item: str, query: RecommendationQuery) -> RankedList:
        """The model's list for the user after a positive event on ``item`` now.

        Raises:
            NotFound: the item does not exist.
            Conflict: there is no model.
            Unavailable: too many requests wait to be ranked.
        """
        context = await self._contexts.load(user, query)
        internal = context.catalogue.internal_ids.get(item)
        if internal is None or internal in context.catalogue.deleted:
            raise NotFound("the item does not exist", code="unknown_item")
        model = await self._models.get(query.model)
        if model is None:
            raise Conflict("no model is active", code="no_model")
        context.profile = _with_event(context.profile, internal, context.at_us)
        items = model.items(context.catalogue)
        request = rank_request(context, model)
        if request is None:
            return EMPTY_LIST
        # Without keys: no cache may hold what has not happened.
        request = replace(request, user=replace(request.user, key=None), key=None, trained_key=None)
        best = await self._batcher.rank(model.engine, request, ready=False)
        return RankedList.ranked(
            context.catalogue, items.internal, source_of(request.user), best, explain=query.explain
        )


def _with_event(profile: Profile, item: int, at_us: int) -> Profile:
    """The profile with a positive event on an item as its latest event."""
    seq = profile.event_seq + 1
    weight = profile.event_weights.weight(DEFAULT_TYPE, None)
    return Profile(
        profile.user_id,
        seq,
        np.append(profile.seen, item),
        np.append(profile.seqs, seq),
        np.append(profile.weights, np.float32(weight if weight > 0 else 1.0)),
        np.append(profile.timestamps, at_us),
        profile.preferences,
        profile.event_seq,
        profile.catalog_seq,
        profile.event_weights,
        profile.attributes,
        profile.attributes_seq,
    )
