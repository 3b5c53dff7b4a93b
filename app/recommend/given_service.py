"""Items that a caller names: ranked for a user, or compared with each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.view import Catalogue
from app.core.errors import Conflict, Unavailable, Unprocessable
from app.recommend.asking import Asked, mean_request, request_of, source_of
from app.recommend.batcher import Batcher, ClientGone, IsGone
from app.recommend.entries import answer_of, entry, entry_of, listed, new_recommendation_id
from app.recommend.filters import Filters
from app.recommend.given import GivenItems
from app.recommend.places import RankedItem
from app.recommend.popular import PopularList
from app.recommend.serving import ServingModel
from app.recommend.sources import Sources
from app.recommend.trying import Trying


class GivenService:
    """Takes each item once, at its first place. Not cached: callers' lists are of any kind."""

    def __init__(
        self,
        sources: Sources,
        popular: PopularList,
        batcher: Batcher,
        trying: Trying | None = None,
    ) -> None:
        self._sources = sources
        self._popular = popular
        self._batcher = batcher
        self._trying = trying

    async def rerank(
        self, user: str, items: Sequence[str], filters: Filters, gone: IsGone | None = None
    ) -> bytes:
        """The body of the answer: all the items, in the order in which the user would like them.

        Those that the model knows come first, by Algorithm 1 over just these in the order given;
        the others follow in that order. Nothing is left out: seen, disliked and hidden items are
        the caller's own choice. For someone of whom nothing is known they stand by popularity.
        """
        started = time.perf_counter()
        asked = await self._sources.ask(user, filters, gone)
        model = await self._sources.model(filters.model)
        items = list(dict.fromkeys(items))
        ids = _ids(asked.catalogue, items)
        request = None if model is None else request_of(asked, model)
        ranked: list[tuple[int, RankedItem | None]]
        if model is None or request is None:
            ranked = [(at, None) for at in await self._by_popularity(ids, asked)]
        else:
            rows = model.rows(asked.catalogue).at(ids)
            known = np.flatnonzero(rows >= 0)
            position = dict(zip(rows[known].tolist(), known.tolist(), strict=True))
            given = GivenItems(request, rows[known])
            places = await self._rank(model, given, gone) if len(known) else []
            ranked = [(position[place.row], place) for place in places]
            ranked += [(at, None) for at in np.flatnonzero(rows < 0).tolist()]
        source = source_of(request)
        entries = []
        for rank, (at, place) in enumerate(ranked, 1):
            own = source if place is not None else "popular"
            if ids[at] < 0:
                entries.append(entry(items[at], None, rank, own))
            else:
                entries.append(entry_of(asked.catalogue, int(ids[at]), rank, own, place))
        found = listed(entries, [int(ids[at]) for at, _ in ranked])
        version = None if model is None else model.version
        if self._trying is not None and version is not None:
            self._trying.counted(version)
        return answer_of(
            user,
            version,
            asked.profile.event_seq,
            found.json,
            started,
            new_recommendation_id(version),
        )

    async def compare(
        self, user: str, items: Sequence[str], filters: Filters, gone: IsGone | None = None
    ) -> bytes:
        """The body of the answer: how probably the user prefers each item to each.

        For someone of whom nothing is known they are those of the mean user, and ``source`` is
        `popular`. Raises Unprocessable for an item that the model does not know, Conflict where
        there is no model yet.
        """
        asked = await self._sources.ask(user, filters, gone)
        model = await self._sources.model(filters.model)
        if model is None:
            raise Conflict("there is no model yet that could compare items", code="no_model")
        items = list(dict.fromkeys(items))
        rows = model.rows(asked.catalogue).at(_ids(asked.catalogue, items))
        if (rows < 0).any():
            first = items[int((rows < 0).argmax())]
            raise Unprocessable(f"the model does not know {first!r:.80}", code="item_not_ranked")
        request = request_of(asked, model)
        given = GivenItems(request or mean_request(asked), rows)
        try:
            found = await self._batcher.compare(model, given, gone)
        except ClientGone:
            raise Unavailable("the client has gone", code="client_gone") from None
        return orjson.dumps(
            {
                "user": user,
                "model_version": model.version,
                "as_of_seq": asked.profile.event_seq,
                "source": source_of(request),
                "items": items,
                "probability": _symmetric(found.probability).tolist(),
                "order": [items[at] for at in found.order],
            }
        )

    async def _rank(
        self, model: ServingModel, given: GivenItems, gone: IsGone | None
    ) -> list[RankedItem]:
        try:
            return await self._batcher.rank_given(model, given, gone)
        except ClientGone:
            raise Unavailable("the client has gone", code="client_gone") from None

    async def _by_popularity(self, ids: NDArray[np.int64], asked: Asked) -> list[int]:
        """Positions by the number of the items' users, most first, ties in the order given."""
        await self._popular.ranked(asked.profile.event_seq)
        counts = self._popular.counts
        counted = (ids >= 0) & (ids < len(counts))
        users = np.zeros(len(ids), dtype=np.int64)
        users[counted] = counts[ids[counted]]
        order: list[int] = np.argsort(-users, kind="stable").tolist()
        return order


def _ids(catalogue: Catalogue, items: Sequence[str]) -> NDArray[np.int64]:
    """The catalogue's ids of the items, −1 for those that there are not."""
    return np.array([catalogue.internal_ids.get(item, -1) for item in items], dtype=np.int64)


def _symmetric(probability: NDArray[np.floating]) -> NDArray[np.float64]:
    """Rounded as they are sent, and so that P(i over j) + P(j over i) = 1 still holds."""
    upper = np.triu(np.round(probability.astype(np.float64), 6), 1)
    lower = np.tril(np.round(1.0 - upper.T, 6), -1)
    return upper + lower + 0.5 * np.eye(len(upper))
