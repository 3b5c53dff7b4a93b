"""Lists that were ranked to their end for their next pages, so that their order stays the same."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache, SingleFlight
from app.core.redis import RedisClient
from app.recommend.response import Entry, RankedList


@dataclass(frozen=True, slots=True, eq=False)
class FrozenList:
    """The places of a list, best first."""

    version: str | None
    """The model version that ranked the items; None without a model."""
    ids: NDArray[np.int64]
    """(k,) the catalogue's ids of the items."""
    scores: NDArray[np.float64]
    """(k,) the scores; NaN for items that no model ranked."""
    ahead: NDArray[np.float64]
    """(k,) the probability that the user prefers an item to the next item; NaN where unknown."""
    source: str
    """The `source` of the items that a model ranked."""

    @classmethod
    def of(cls, version: str | None, ranked: RankedList) -> FrozenList:
        """The frozen form of a version's list."""
        entries = ranked.entries()
        sources = {entry["source"] for entry in entries} - {"popular"}
        return cls(
            version,
            np.array(ranked.ids, dtype=np.int64),
            _numbers(entry["score"] for entry in entries),
            _numbers(entry["preferred_over_next"] for entry in entries),
            next(iter(sources), "popular"),
        )

    @classmethod
    def from_bytes(cls, value: bytes | None) -> FrozenList | None:
        """The list in bytes of another server; None for missing or invalid bytes."""
        if value is None:
            return None
        try:
            parsed = orjson.loads(value)
            ids = np.array(parsed["ids"], dtype=np.int64)
            scores, ahead = _numbers(parsed["scores"]), _numbers(parsed["ahead"])
            version, source = parsed["version"], str(parsed["source"])
        except (ValueError, TypeError, KeyError):
            return None
        if not ids.shape == scores.shape == ahead.shape == (len(ids),) or (ids < 0).any():
            return None
        return cls(version, ids, scores, ahead, source)

    def to_bytes(self) -> bytes:
        """The list as bytes for other servers; NaN becomes null."""
        fields = {
            "version": self.version,
            "source": self.source,
            "ids": self.ids,
            "scores": self.scores,
            "ahead": self.ahead,
        }
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)

    @property
    def nbytes(self) -> int:
        """The memory of the list, in bytes."""
        return 3 * self.ids.nbytes

    def places(self, allowed: NDArray[np.bool_], shown: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of items that are ``allowed``, (size,) by id, and not ``shown`` yet."""
        left = self.ids < len(allowed)
        left[left] = allowed[self.ids[left]]
        return np.flatnonzero(left & ~np.isin(self.ids, shown))

    def entries(self, places: NDArray[np.int64], catalogue: Catalogue, first: int) -> list[Entry]:
        """The entries of an answer for the items at some places, ranked from ``first``."""
        entries: list[Entry] = []
        for rank, place in enumerate(places.tolist(), first):
            internal_id, score = int(self.ids[place]), float(self.scores[place])
            is_next = rank - first + 1 < len(places) and places[rank - first + 1] == place + 1
            ahead = float(self.ahead[place])
            entries.append(
                {
                    "id": catalogue.external_ids[internal_id],
                    "title": catalogue.titles[internal_id],
                    "rank": rank,
                    "score": None if np.isnan(score) else score,
                    "source": "popular" if np.isnan(score) else self.source,
                    "preferred_over_next": ahead if is_next and not np.isnan(ahead) else None,
                }
            )
        return entries


@dataclass(frozen=True, slots=True, eq=False)
class FrozenCounts:
    """The places of a list of popular or trending items, best first."""

    ids: NDArray[np.int64]
    """(k,) the catalogue's ids of the items."""
    users: NDArray[np.int64]
    """(k,) the number of users of each item."""
    before: NDArray[np.int64]
    """(k,) the number of users in the window before; zeros in lists of popular items."""

    @classmethod
    def from_bytes(cls, value: bytes | None) -> FrozenCounts | None:
        """The list in bytes of another server; None for missing or invalid bytes."""
        try:
            parsed = None if value is None else orjson.loads(value)["counts"]
            rows = None if parsed is None else np.array(parsed, dtype=np.int64)
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        if rows is None or rows.ndim != 2 or len(rows) != 3 or (rows < 0).any():
            return None
        return cls(*rows)

    def to_bytes(self) -> bytes:
        """The list as bytes for other servers."""
        rows = np.stack([self.ids, self.users, self.before])
        return orjson.dumps({"counts": rows}, option=orjson.OPT_SERIALIZE_NUMPY)

    @property
    def nbytes(self) -> int:
        """The memory of the list, in bytes."""
        return 3 * self.ids.nbytes


class _Frozen(Protocol):
    @classmethod
    def from_bytes(cls, value: bytes | None) -> Self | None: ...

    def to_bytes(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...


Frozen = TypeVar("Frozen", bound=_Frozen)


class FrozenLists(Generic[Frozen]):
    """Keeps lists by `ListCursor.list_key`: in memory, and in Redis if available."""

    def __init__(
        self, kind: type[Frozen], cache_bytes: int, redis: RedisClient | None = None
    ) -> None:
        self._kind = kind
        self._cache: ByteCache[bytes, Frozen] = ByteCache(cache_bytes)
        self._flights: SingleFlight[bytes, Frozen] = SingleFlight()
        self._redis = redis

    async def get(self, origin: bytes, make: Callable[[], Coroutine[Any, Any, Frozen]]) -> Frozen:
        """The list of the key ``origin``; ``make`` ranks the list where no server has it."""
        kept = self._cache.get(origin)
        if kept is not None:
            return kept

        async def find() -> Frozen:
            name = f"pages:{origin.hex()}"
            found = None
            if self._redis is not None:
                found = self._kind.from_bytes(await self._redis.get(name))
            if found is None:
                found = await make()
                if self._redis is not None:
                    self._redis.put(name, found.to_bytes())
            self._cache.put(origin, found, found.nbytes)
            return found

        return await self._flights.run(origin, find)


def _numbers(values: Any) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
