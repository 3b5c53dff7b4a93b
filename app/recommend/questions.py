"""What to ask a user about: pairs of items, whose answers go to `POST /preferences`."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.view import Catalogue
from app.core.cache import SingleFlight
from app.core.errors import Unavailable
from app.core.overload import Places
from app.recommend.asking import Asked, allowed_items, request_of
from app.recommend.batcher import Batcher, ClientGone, IsGone
from app.recommend.evidence import MOST
from app.recommend.filters import Filters
from app.recommend.popular import PopularList
from app.recommend.serving import ServingModel
from app.recommend.sources import Sources
from ncr_core.ranking.questions import QuestionPool

POOL_ITEMS = 96
"""The most popular items, which most users know: 4,560 pairs of a version's own."""
OWN_ITEMS = 32
"""Of a user who has seen most of those: the next popular ones, for this answer alone."""

MOST_AT_ONCE = 16
"""Each takes a thread: with a model of MovieLens 1M 6 ms for five questions, 21 for fifty."""

Pairs = set[tuple[int, int]]
ModelKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """Internal ids, and the bits that the answer is expected to tell; None where nobody knows."""

    a: int
    b: int
    information: float | None


class QuestionService:
    """Asks about visible items that the user has not seen, and about no pair a second time."""

    def __init__(self, sources: Sources, popular: PopularList, batcher: Batcher) -> None:
        self._sources = sources
        self._popular = popular
        self._batcher = batcher
        self._pool: tuple[ModelKey, QuestionPool] | None = None
        self._making: SingleFlight[ModelKey, QuestionPool] = SingleFlight()
        self._places = Places(MOST_AT_ONCE, "many questions are being chosen")

    async def questions(self, user: str, n: int, gone: IsGone | None = None) -> bytes:
        """The body of the answer. With nothing left to ask about it is empty and says why.

        Raises Unavailable when many are under way.
        """
        with self._places.one():
            return await self._questions(user, n, gone)

    async def _questions(self, user: str, n: int, gone: IsGone | None) -> bytes:
        asked = await self._sources.ask(user, Filters(n), gone)
        model = await self._sources.model(None)
        catalogue, profile = asked.catalogue, asked.profile
        allowed = allowed_items(asked)
        popular = await self._by_popularity(asked)
        done = {(int(a), int(b)) for a, b in profile.preferences[:, :2]}
        pairs: list[Pair] = []
        if int(allowed.sum()) >= 2:
            if model is not None:
                pairs = await self._telling(asked, model, popular, allowed, done)
            if not pairs:
                pairs = _neighbours(popular[allowed[popular]], n, done)
        reason = None
        if not pairs:
            reason = "asked_everything"
            if int(allowed.sum()) < 2:
                few = int(catalogue.visible.sum()) < 2
                reason = "too_few_items" if few else "seen_everything"
        known = any(pair.information is not None for pair in pairs)
        return orjson.dumps(
            {
                "user": user,
                "model_version": None if model is None else model.version,
                "as_of_seq": profile.event_seq,
                "source": "model" if known else "popular",
                "items": [_entry(catalogue, pair) for pair in pairs],
                "reason": reason,
            }
        )

    async def _telling(
        self,
        asked: Asked,
        model: ServingModel,
        popular: NDArray[np.int64],
        allowed: NDArray[np.bool_],
        done: Pairs,
    ) -> list[Pair]:
        rows = model.rows(asked.catalogue)
        visible = rows.at(popular[asked.catalogue.visible[popular]])
        visible = visible[visible >= 0]
        if len(visible) < 2:
            return []
        pool = await self._pool_of(model, visible[:POOL_ITEMS])
        free = rows.at(popular[allowed[popular]])
        free = free[free >= 0]
        own = free[~np.isin(free, pool.items)][:OWN_ITEMS]
        profile, n = asked.profile, asked.filters.n
        vector = await self._vector(asked, model) if len(profile.seen) else None
        events = len(profile.positives) + len(profile.disliked)
        stated = rows.at(profile.pairs[-MOST:].flatten()).reshape(-1, 2)
        seed = int.from_bytes(hashlib.blake2b(asked.user.encode(), digest_size=8).digest(), "big")
        told = rows.at(np.array(sorted(done), dtype=np.int64).reshape(-1, 2).flatten())
        asked_rows = [(int(a), int(b)) for a, b in told.reshape(-1, 2)]

        def choose() -> list[Pair]:
            plausible = pool.plausible(stated, vector, events)
            still = np.isin(pool.items, free)
            found = pool.choose(n, still, asked_rows, plausible, seed)
            if len(found) < n and len(own) >= 2:
                more = model.question_pool(own)
                every = np.ones(len(own), dtype=np.bool_)
                found += more.choose(n - len(found), every, asked_rows, plausible, seed)
            return [
                Pair(int(rows.internal[q.a]), int(rows.internal[q.b]), q.information) for q in found
            ]

        return await asyncio.to_thread(choose)

    async def _pool_of(self, model: ServingModel, rows: NDArray[np.int64]) -> QuestionPool:
        """The version's, made when it is first asked for."""
        kept = self._pool
        if kept is not None and kept[0] == model.key:
            return kept[1]

        async def make() -> QuestionPool:
            pool = await asyncio.to_thread(model.question_pool, rows)
            self._pool = model.key, pool
            return pool

        # Not by the version alone: new items' rows are others after the next were fitted.
        return await self._making.run(model.key, make)

    async def _vector(self, asked: Asked, model: ServingModel) -> NDArray[np.float32] | None:
        request = request_of(asked, model)
        if request is None:
            return None
        try:
            return await self._batcher.vector(model, request, asked.gone)
        except ClientGone:
            raise Unavailable("the client has gone", code="client_gone") from None

    async def _by_popularity(self, asked: Asked) -> NDArray[np.int64]:
        """Internal ids of all items, most popular first, then those that nobody took up, newest
        first."""
        size = asked.catalogue.size
        ranked = await self._popular.ranked(asked.profile.event_seq)
        ranked = ranked[ranked < size]
        rest = np.ones(size, dtype=np.bool_)
        rest[ranked] = False
        return np.concatenate([ranked, np.flatnonzero(rest)[::-1]])


def _neighbours(ranked: NDArray[np.int64], n: int, done: Pairs) -> list[Pair]:
    """Items of about the same popularity: as many as possible have heard of both."""
    left: list[int] = ranked[: 4 * n + 2 * len(done) + 2].tolist()
    pairs: list[Pair] = []
    while len(left) > 1 and len(pairs) < n:
        first = left.pop(0)
        for second in left:
            if (first, second) not in done and (second, first) not in done:
                pairs.append(Pair(first, second, None))
                left.remove(second)
                break
    return pairs


def _entry(catalogue: Catalogue, pair: Pair) -> dict[str, Any]:
    return {
        "a": _item(catalogue, pair.a),
        "b": _item(catalogue, pair.b),
        "information": None if pair.information is None else round(pair.information, 6),
    }


def _item(catalogue: Catalogue, internal: int) -> dict[str, Any]:
    return {"id": catalogue.external_ids[internal], "title": catalogue.titles[internal]}
