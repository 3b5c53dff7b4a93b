"""From a user to a ranked list."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app import __version__
from app.catalog.service import CatalogService
from app.catalog.view import Catalogue
from app.core.cache import ByteCache, SingleFlight
from app.core.errors import Conflict, Unavailable, Unprocessable
from app.core.randomness import random_hex
from app.core.shared import Shared
from app.events.schemas import Profile
from app.events.service import EventService
from app.models.service import ModelRegistry
from app.recommend.batcher import Batcher, ClientGone, IsGone
from app.recommend.candidates import RankRequest
from app.recommend.model_host import ModelHost
from app.recommend.popular import PopularList
from app.recommend.serving import ServingModel, filters_key

STRING_BYTES = 60  # of a Python string without its characters
NEWCOMER: Hashable = None  # in the place of a user and seq: all get the same


@dataclass(frozen=True)
class Filters:
    """What a request asks for beside the user."""

    n: int = 10
    exclude_seen: bool = True
    categories: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_seq: int | None = None
    model: str | None = None

    @cached_property
    def key(self) -> Hashable:
        """What a list depends on of it."""
        return (self.n, self.exclude_seen, self.categories, self.exclude)

    @cached_property
    def key_bytes(self) -> int:
        """What the strings in the key take."""
        return sum(STRING_BYTES + 4 * len(x) for x in (*self.categories, *self.exclude))


@dataclass(frozen=True, slots=True, eq=False)
class RankedList:
    """The items of an answer, ready to be sent."""

    json: bytes
    """Objects with commas between them."""
    ids: tuple[int, ...]
    """The catalogue's ids of the items."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request for a personal list, with what it is to be answered from."""

    model: ServingModel
    user: str
    profile: Profile
    catalogue: Catalogue
    filters: Filters
    gone: IsGone | None
    on_slow: Callable[[], None] | None


EMPTY = RankedList(b"", ())
_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


class RecommendService:
    """Profile → ranked list from the cache, else from the model → filled up with the popular."""

    def __init__(
        self,
        events: EventService,
        catalog: CatalogService,
        registry: ModelRegistry,
        host: ModelHost,
        batcher: Batcher,
        list_cache_bytes: int = 0,
        shared: Shared | None = None,
    ) -> None:
        self._shared = shared
        self._events = events
        self._catalog = catalog
        self._registry = registry
        self._host = host
        self._batcher = batcher
        self._popular = PopularList(events)
        self.lists: ByteCache[Hashable, RankedList] = ByteCache(list_cache_bytes)
        self._flights: SingleFlight[Hashable, RankedList] = SingleFlight()

    async def recommend(
        self,
        user: str,
        filters: Filters,
        gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> bytes:
        """The body of the answer, as JSON. ``gone`` tells whether the client is; ``on_slow`` is
        told when the answer will have to wait for those that take long.

        Everything that was committed about the user has been taken in: see `Profiles`.
        """
        started = time.perf_counter()
        profile = await self._events.profile(user, filters.min_seq)
        if filters.min_seq is not None and profile.event_seq < filters.min_seq:
            raise Conflict(
                f"no event has the seq {filters.min_seq} yet; the last is {profile.event_seq}",
                code="seq_not_reached",
            )
        catalogue = await self._catalog.catalogue(profile.catalog_seq)
        model = self._host.current
        if filters.model is not None and (model is None or filters.model != model.version):
            await self._registry.get(filters.model)  # 404 for one that there is not
            raise Unprocessable("only the active version can be asked for", code="model_not_served")
        version = None if model is None else model.version
        state = (user, profile.last_seq) if len(profile.seen) else NEWCOMER
        key = (version, state, catalogue.seq, filters.key)
        found = EMPTY
        if model is not None and state is not NEWCOMER:
            found = self.lists.get(key) or await self._ranked(
                key, Asked(model, user, profile, catalogue, filters, gone, on_slow)
            )
        items = found.json
        if len(found.ids) < filters.n:
            filled = await self._filled_up(key, found, profile, catalogue, filters)
            items = b",".join(part for part in (found.json, filled.json) if part)
        return orjson.dumps(
            {
                "recommendation_id": _recommendation_id(version),
                "user": user,
                "model_version": version,
                "as_of_seq": profile.event_seq,
                "took_ms": round((time.perf_counter() - started) * 1000, 2),
                "items": orjson.Fragment(b"[" + items + b"]"),
            }
        )

    async def _ranked(self, key: Hashable, asked: Asked) -> RankedList:
        gone = asked.gone
        while True:
            self._batcher.check()  # before anything is done for a request that will be refused
            try:
                return await self._flights.run(key, lambda: self._personal(key, asked))
            except ClientGone:
                # It may have been another's client who asked for the same list.
                if gone is not None and await gone():
                    raise Unavailable("the client has gone", code="client_gone") from None

    async def _personal(self, key: Hashable, asked: Asked) -> RankedList:
        """The model's own list; empty where it knows nothing of the user."""
        request = _request(asked)
        if request is None:
            return EMPTY
        name = None
        if self._shared is not None:
            # Servers of another version or setting may rank, or describe items, in another way.
            name = f"list:{_digest((__version__, asked.model.n_candidates, key))}"
        if self._shared is not None and name is not None:
            found = _decoded(await self._shared.get(name), asked.catalogue)
            if found is not None:
                self._keep(key, found, asked.filters)
                return found
        source = "model" if request.fold_in_items is None else "fold_in"
        ids = asked.model.rows(asked.catalogue).internal
        ranked = await self._batcher.rank(asked.model, request, asked.gone, asked.on_slow)
        items = [
            _item(asked.catalogue, int(ids[place.row]), rank, source)
            | {
                "score": round(place.score, 6),
                "preferred_over_next": None
                if place.preferred_over_next is None
                else round(place.preferred_over_next, 6),
            }
            for rank, place in enumerate(ranked, 1)
        ]
        found = RankedList(_joined(items), tuple(int(ids[place.row]) for place in ranked))
        self._keep(key, found, asked.filters)
        if self._shared is not None and name is not None:
            self._shared.put(name, _encoded(found))
        return found

    async def _filled_up(
        self,
        key: Hashable,
        found: RankedList,
        profile: Profile,
        catalogue: Catalogue,
        filters: Filters,
    ) -> RankedList:
        """What follows the model's own list: the popular items that are not in it."""
        popular = await self._popular.ranked(profile.event_seq)
        key = (key, self._popular.number)
        kept = self.lists.get(key)
        if kept is None:
            allowed = _allowed(catalogue, profile, filters)
            allowed[_ids_of(catalogue, filters.exclude)] = False
            allowed[list(found.ids)] = False
            first = len(found.ids) + 1
            chosen = _popular_items(popular, allowed, filters.n - len(found.ids))
            items = [_item(catalogue, i, rank, "popular") for rank, i in enumerate(chosen, first)]
            kept = RankedList(_joined(items), tuple(chosen))
            self._keep(key, kept, filters)
        return kept

    def _keep(self, key: Hashable, found: RankedList, filters: Filters) -> None:
        size = len(found.json) + 8 * len(found.ids) + filters.key_bytes
        self.lists.put(key, found, size)


def _request(asked: Asked) -> RankRequest | None:
    """What the model is asked; None where it knows nothing of the user."""
    model, user, profile = asked.model, asked.user, asked.profile
    catalogue, filters = asked.catalogue, asked.filters
    rows = model.rows(catalogue)
    # Someone who was erased and came back is new, though the model may still have their row.
    was_there = len(profile.seqs) > 0 and int(profile.seqs[0]) <= model.trained_seq
    row = model.user_rows.get(user) if was_there else None
    later = len(profile.seqs) > 0 and int(profile.seqs[-1]) > model.trained_seq
    to_fit: NDArray[np.int64] | None = None
    if row is None or later:
        # In internal ids, −1 is an item that the catalogue does not have: never a seen one.
        to_fit = np.flatnonzero(np.isin(rows.internal, profile.seen))
        if len(to_fit) == 0:
            to_fit = None
    if row is None and to_fit is None:
        return None

    def allowed() -> NDArray[np.bool_]:
        return rows.visible & _allowed(catalogue, profile, filters)[rows.internal]

    excluded = _NONE
    if filters.exclude:
        excluded = np.flatnonzero(np.isin(rows.internal, _ids_of(catalogue, filters.exclude)))
    key = filters_key(rows, filters.exclude_seen, filters.categories)
    state = (user, profile.last_seq)
    return RankRequest(row, to_fit, state, key, allowed, filters.n, excluded, filters.key_bytes)


def _allowed(catalogue: Catalogue, profile: Profile, filters: Filters) -> NDArray[np.bool_]:
    """By internal id: visible, in the categories, not seen."""
    allowed = catalogue.visible.copy()
    if filters.categories:
        allowed &= catalogue.mask(filters.categories)
    if filters.exclude_seen:
        allowed[profile.seen[profile.seen < len(allowed)]] = False
    return allowed


def _ids_of(catalogue: Catalogue, items: Sequence[str]) -> list[int]:
    return [found for item in items if (found := catalogue.internal_ids.get(item)) is not None]


def _popular_items(popular: NDArray[np.int64], allowed: NDArray[np.bool_], n: int) -> list[int]:
    popular = popular[popular < len(allowed)]
    chosen = popular[allowed[popular]][:n]
    if len(chosen) < n:  # items that nobody took up yet, newest first
        rest = allowed.copy()
        rest[popular] = False
        chosen = np.concatenate([chosen, np.flatnonzero(rest)[::-1][: n - len(chosen)]])
    found: list[int] = chosen.tolist()
    return found


def _item(catalogue: Catalogue, internal_id: int, rank: int, source: str) -> dict[str, Any]:
    return {
        "id": catalogue.external_ids[internal_id],
        "title": catalogue.titles[internal_id],
        "rank": rank,
        "score": None,
        "source": source,
        "preferred_over_next": None,
    }


def _joined(items: list[dict[str, Any]]) -> bytes:
    return orjson.dumps(items)[1:-1]


def _digest(key: Hashable) -> str:
    """A name for a key that is the same in every process."""
    return hashlib.blake2b(
        repr(key).encode("utf-8", "backslashreplace"), digest_size=16
    ).hexdigest()


def _encoded(found: RankedList) -> bytes:
    return orjson.dumps({"ids": found.ids, "items": orjson.Fragment(b"[" + found.json + b"]")})


def _decoded(value: bytes | None, catalogue: Catalogue) -> RankedList | None:
    """A list that another server has ranked; None for what no server can have written."""
    if value is None:
        return None
    try:
        read = orjson.loads(value)
        ids, items = tuple(read["ids"]), read["items"]
        same = [catalogue.external_ids[i] for i in ids] == [item["id"] for item in items]
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return RankedList(_joined(items), ids) if same else None


def _recommendation_id(version: str | None) -> str:
    """Carries what attribution needs: the model, the time and a random part."""
    return f"{version or 'none'}.{time.time_ns() // 1_000_000:x}.{random_hex(6)}"
