"""From a user to a ranked list."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.catalog.service import CatalogService
from app.catalog.view import Catalogue
from app.core.errors import Conflict, Unprocessable
from app.events.schemas import Profile
from app.events.service import EventService
from app.models.service import ModelRegistry
from app.recommend.batcher import Batcher
from app.recommend.model_host import ModelHost
from app.recommend.popular import PopularList
from app.recommend.serving import RankRequest, ServingModel


@dataclass(frozen=True, slots=True)
class Filters:
    """What a request asks for beside the user."""

    n: int = 10
    exclude_seen: bool = True
    categories: Sequence[str] = ()
    exclude: Sequence[str] = ()
    min_seq: int | None = None
    model: str | None = None


class RecommendService:
    """Profile → model or popularity → filters → ranked list."""

    def __init__(
        self,
        events: EventService,
        catalog: CatalogService,
        registry: ModelRegistry,
        host: ModelHost,
        batcher: Batcher,
    ) -> None:
        self._events = events
        self._catalog = catalog
        self._registry = registry
        self._host = host
        self._batcher = batcher
        self._popular = PopularList(events)

    async def recommend(self, user: str, filters: Filters) -> dict[str, Any]:
        """The body of the answer. Everything committed about the user has been taken in."""
        started = time.perf_counter()
        profile = await self._events.profile(user)
        if filters.min_seq is not None and profile.event_seq < filters.min_seq:
            raise Conflict(
                f"no event has the seq {filters.min_seq} yet; the last is {profile.event_seq}",
                code="seq_not_reached",
            )
        catalogue = await self._catalog.catalogue(profile.catalog_seq)
        allowed = _allowed(catalogue, profile, filters)
        model = self._host.current
        if filters.model is not None and (model is None or filters.model != model.version):
            await self._registry.get(filters.model)  # 404 for one that there is not
            raise Unprocessable("only the active version can be asked for", code="model_not_served")
        items: list[dict[str, Any]] = []
        if model is not None:
            items = await self._personal(model, user, profile, catalogue, allowed, filters.n)
        if len(items) < filters.n:
            taken = [catalogue.internal_ids[item["id"]] for item in items]
            allowed[taken] = False
            popular = await self._popular.ranked(profile.event_seq)
            items += _popular_items(popular, catalogue, allowed, filters.n - len(items))
        for rank, item in enumerate(items, 1):
            item["rank"] = rank
        version = None if model is None else model.version
        return {
            "recommendation_id": _recommendation_id(version),
            "user": user,
            "model_version": version,
            "as_of_seq": profile.event_seq,
            "took_ms": round((time.perf_counter() - started) * 1000, 2),
            "items": items,
        }

    async def _personal(
        self,
        model: ServingModel,
        user: str,
        profile: Profile,
        catalogue: Catalogue,
        allowed: NDArray[np.bool_],
        n: int,
    ) -> list[dict[str, Any]]:
        """The model's own list; empty where it knows nothing of the user."""
        internal = model.internal_ids(catalogue)
        # Someone who was erased and came back is new, though the model may still have their row.
        was_there = bool(profile.seqs) and profile.seqs[0] <= model.trained_seq
        row = model.user_rows.get(user) if was_there else None
        later = any(seq > model.trained_seq for seq in reversed(profile.seqs))
        to_fit: NDArray[np.int64] | None = None
        if row is None or later:
            # In internal ids, −1 is an item that the catalogue does not have: never a seen one.
            to_fit = np.flatnonzero(np.isin(internal, profile.seen))
            if len(to_fit) == 0:
                to_fit = None
        if row is None and to_fit is None:
            return []
        rows_allowed = np.where(internal >= 0, allowed[internal], False)
        request = RankRequest(row, to_fit, (user, profile.last_seq), rows_allowed, n)
        source = "model" if to_fit is None else "fold_in"
        return [
            _item(catalogue, int(internal[place.row]), source)
            | {
                "score": round(place.score, 6),
                "preferred_over_next": None
                if place.preferred_over_next is None
                else round(place.preferred_over_next, 6),
            }
            for place in await self._batcher.rank(model, request)
        ]


def _allowed(catalogue: Catalogue, profile: Profile, filters: Filters) -> NDArray[np.bool_]:
    """By internal id: visible, in the categories, not seen, not excluded."""
    allowed = catalogue.visible.copy()
    if filters.categories:
        allowed &= catalogue.mask(filters.categories)
    if filters.exclude_seen and profile.seen:
        seen = np.array(profile.seen, dtype=np.int64)
        allowed[seen[seen < len(allowed)]] = False
    excluded = [catalogue.internal_ids.get(item) for item in filters.exclude]
    allowed[[i for i in excluded if i is not None]] = False
    return allowed


def _popular_items(
    popular: NDArray[np.int64], catalogue: Catalogue, allowed: NDArray[np.bool_], n: int
) -> list[dict[str, Any]]:
    popular = popular[popular < len(allowed)]
    chosen = popular[allowed[popular]][:n]
    if len(chosen) < n:  # items that nobody took up yet, newest first
        rest = allowed.copy()
        rest[popular] = False
        chosen = np.concatenate([chosen, np.flatnonzero(rest)[::-1][: n - len(chosen)]])
    return [_item(catalogue, int(i), "popular") for i in chosen]


def _item(catalogue: Catalogue, internal_id: int, source: str) -> dict[str, Any]:
    return {
        "id": catalogue.external_ids[internal_id],
        "title": catalogue.titles[internal_id],
        "rank": 0,
        "score": None,
        "source": source,
        "preferred_over_next": None,
    }


def _recommendation_id(version: str | None) -> str:
    """Carries what attribution needs: the model, the time and a random part."""
    return f"{version or 'none'}.{time.time_ns() // 1_000_000:x}.{secrets.token_hex(6)}"
