"""Preference elicitation: pairs of items to ask a user about."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.core.cache import SingleFlight
from app.core.middleware import ConcurrencyLimiter
from app.inference.batcher import Batcher, IsGone
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.context import (
    MAX_EVIDENCE,
    RecommendationContext,
    allowed_items,
    user_state,
)
from app.recommend.popularity import PopularityRanking
from app.recommend.schemas import (
    UNRULED,
    NoQuestions,
    Question,
    QuestionItem,
    Questions,
    RecommendationQuery,
)
from app.recommend.service import ContextLoader
from ncr_core.explain.elicitation import QuestionPool

POOL_ITEMS = 96
"""The most popular items, which most users know: 4,560 pairs for all users of a version."""
EXTRA_ITEMS = 32
"""The next popular items, for a user who has seen most of the pool."""
MAX_CONCURRENT = 16
"""Each request takes a thread: on MovieLens 1M, 6 ms for 5 questions and 21 ms for 50."""

IdPairs = set[tuple[int, int]]
ModelKey = tuple[str, str]
OLD_POOL_SECONDS = 1.0
"""The wait for a new version's pool, before the previous version's pool serves."""


@dataclass(frozen=True, slots=True)
class ItemPair:
    """Internal ids of two items to ask about."""

    a: int
    b: int
    information: float | None
    """The expected information of the answer, in bits; None where no model chose the pair."""


class _VersionPool(NamedTuple):
    """The questions that a version can ask, and the version itself, which weighs the answers."""

    model: LoadedModel
    pool: QuestionPool


class QuestionService:
    """Chooses pairs of visible items that the user has not seen, without answered pairs."""

    def __init__(
        self,
        contexts: ContextLoader,
        models: ModelManager,
        popularity: PopularityRanking,
        batcher: Batcher,
    ) -> None:
        self._contexts = contexts
        self._models = models
        self._popularity = popularity
        self._batcher = batcher
        self._pool: _VersionPool | None = None
        self._flights: SingleFlight[ModelKey, _VersionPool] = SingleFlight()
        self._making: set[asyncio.Future[_VersionPool]] = set()
        self._slots = ConcurrencyLimiter(
            MAX_CONCURRENT, "too many requests for questions are in progress; retry later"
        )

    async def questions(self, user: str, n: int, is_gone: IsGone | None = None) -> Questions:
        """The questions; where none are left, an empty list and the reason.

        Raises:
            Unavailable: too many questions are being chosen.
        """
        with self._slots.one():
            return await self._questions(user, n, is_gone)

    async def _questions(self, user: str, n: int, is_gone: IsGone | None) -> Questions:
        context = await self._contexts.load(user, RecommendationQuery(n, **UNRULED), is_gone)
        catalogue, profile = context.catalogue, context.profile
        allowed = allowed_items(context)
        popular = await self._by_popularity(context)
        answered = {(int(a), int(b)) for a, b in profile.preferences[:, :2]}
        pairs: list[ItemPair] = []
        model = self._models.current
        if int(allowed.sum()) >= 2:
            prepared = None if model is None else await self._prepared(context, model, popular)
            if prepared is not None:
                model = prepared.model
                pairs = await self._choose(context, prepared, popular, allowed, answered)
            if not pairs:
                pairs = _neighbours(popular[allowed[popular]], n, answered)
        reason: NoQuestions | None = None
        if not pairs:
            reason = "asked_everything"
            if int(allowed.sum()) < 2:
                few = int(catalogue.visible.sum()) < 2
                reason = "too_few_items" if few else "seen_everything"
        known = any(pair.information is not None for pair in pairs)
        return Questions(
            user=user,
            model_version=None if model is None else model.version,
            as_of_seq=profile.event_seq,
            source="model" if known else "popular",
            items=[_question(catalogue, pair) for pair in pairs],
            reason=reason,
        )

    async def _choose(
        self,
        context: RecommendationContext,
        prepared: _VersionPool,
        popular: NDArray[np.int64],
        allowed: NDArray[np.bool_],
        answered: IdPairs,
    ) -> list[ItemPair]:
        """The pairs with the most expected information, by the model."""
        model, pool = prepared
        items = model.items(context.catalogue)
        profile, n = context.profile, context.query.n
        state = user_state(context, model) if len(profile.seen) else None
        unseen = items.rows(popular[allowed[popular]])
        unseen = unseen[unseen >= 0]
        extra = unseen[~np.isin(unseen, pool.items)][:EXTRA_ITEMS]
        vector: NDArray[np.float32] | None = None
        if state is not None:
            vector = await self._batcher.user_vector(model.engine, state, context.is_gone)
        events = len(profile.positives) + len(profile.disliked)
        stated = items.rows(profile.pairs[-MAX_EVIDENCE:].flatten()).reshape(-1, 2)
        seed = int.from_bytes(hashlib.blake2b(context.user.encode(), digest_size=8).digest(), "big")
        rows = items.rows(np.array(sorted(answered), dtype=np.int64).reshape(-1, 2).flatten())
        answered_rows = [(int(a), int(b)) for a, b in rows.reshape(-1, 2)]

        def choose() -> list[ItemPair]:
            plausible = pool.plausible(stated, vector, events)
            open_items = np.isin(pool.items, unseen)
            questions = pool.choose(n, open_items, answered_rows, plausible, seed)
            if len(questions) < n and len(extra) >= 2:
                extra_pool = model.engine.question_pool(extra)
                every = np.ones(len(extra), dtype=np.bool_)
                missing = n - len(questions)
                questions += extra_pool.choose(missing, every, answered_rows, plausible, seed)
            ids = items.internal
            return [ItemPair(int(ids[q.a]), int(ids[q.b]), q.information) for q in questions]

        return await asyncio.to_thread(choose)

    async def _prepared(
        self, context: RecommendationContext, model: LoadedModel, popular: NDArray[np.int64]
    ) -> _VersionPool | None:
        """The version's pool, made on first use; None where the model knows fewer than two items.

        A pool takes seconds where a model ranks by a network. Meanwhile the previous pool serves.
        """
        before = self._pool
        if before is not None and before.model.key == model.key:
            return before
        rows = model.items(context.catalogue).rows(popular[context.catalogue.visible[popular]])
        rows = rows[rows >= 0][:POOL_ITEMS]
        if len(rows) < 2:
            return None

        async def make() -> _VersionPool:
            pool = await asyncio.to_thread(model.engine.question_pool, rows)
            self._pool = _VersionPool(model, pool)
            return self._pool

        # Not by the version alone: new items' rows are others after the next were fitted.
        making = asyncio.ensure_future(self._flights.run(model.key, make))
        if before is None:
            return await making
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        making.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({making}, timeout=OLD_POOL_SECONDS)
        return making.result() if making.done() else before

    async def _by_popularity(self, context: RecommendationContext) -> NDArray[np.int64]:
        """Internal ids of all items: popular items, then items without users, newest first."""
        size = context.catalogue.size
        ranked = await self._popularity.ranked(context.profile.event_seq)
        ranked = ranked[ranked < size]
        rest = np.ones(size, dtype=np.bool_)
        rest[ranked] = False
        return np.concatenate([ranked, np.flatnonzero(rest)[::-1]])


def _neighbours(ranked: NDArray[np.int64], n: int, answered: IdPairs) -> list[ItemPair]:
    """Pairs of items of about the same popularity, most popular first.

    Most users know both items of a popular pair.
    """
    left: list[int] = ranked[: 4 * n + 2 * len(answered) + 2].tolist()
    pairs: list[ItemPair] = []
    while len(left) > 1 and len(pairs) < n:
        first = left.pop(0)
        for second in left:
            if (first, second) not in answered and (second, first) not in answered:
                pairs.append(ItemPair(first, second, None))
                left.remove(second)
                break
    return pairs


def _question(catalogue: Catalogue, pair: ItemPair) -> Question:
    a, b = (
        QuestionItem(id=catalogue.external_ids[internal], title=catalogue.titles[internal])
        for internal in (pair.a, pair.b)
    )
    bits = None if pair.information is None else round(pair.information, 6)
    return Question(a=a, b=b, information=bits)
