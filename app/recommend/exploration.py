"""Lists for newcomers: popular items, and in some places other items, drawn for each user.

By popularity alone, all users see the same few items, and items that no list shows get no events.
An item beyond the list's popular items is drawn with a probability in proportion to √(users + 1).
Known items are thus drawn more often, and new items now and then.
"""

from __future__ import annotations

import hashlib
import struct
import time
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache
from app.recommend.context import RecommendationContext
from app.recommend.popularity import backfill_items, most_popular
from app.recommend.response import RankedList, popular_entry
from app.recommend.schemas import RecommendationQuery

DAY_SECONDS = 86_400
MAX_KNOWN, MAX_NEW = 10_000, 10_000  # to draw from: the most popular, the newest
MAX_SHORT, MAX_RUNS = 20, 64  # items of a list of which some JSON is kept, and how many pieces
MAX_TRIES = 64  # to draw an item that is not drawn yet
BLOCK_NUMBERS = 32  # drawn at once
_BLOCK = f"<{BLOCK_NUMBERS}Q"


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The parts of newcomers' lists, the same for all newcomers with the same query."""

    popular: tuple[int, ...]
    """Internal ids of the most popular items, as many as a list has."""
    parts: tuple[tuple[bytes, bytes], ...]
    """The JSON of each popular item, before and after its rank."""
    others: NDArray[np.int64]
    """(k,) internal ids of the items to draw from."""
    cumulative: Sequence[float]
    """(k,) cumulative weights of ``others``."""
    runs: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """The JSON of some runs of adjacent popular items in short lists, by the arguments of `run`."""

    @property
    def nbytes(self) -> int:
        """The maximum memory of the pool, in bytes."""
        json = sum(len(head) + len(tail) + 200 for head, tail in self.parts)
        runs = MAX_RUNS * json if len(self.parts) <= MAX_SHORT else 0
        return json + runs + self.others.nbytes + 32 * len(self.cumulative)

    def run(self, start: int, stop: int, before: int) -> bytes:
        """The JSON of adjacent popular items that ``before`` drawn items precede."""
        key = (start, stop, before)
        json = self.runs.get(key)
        if json is None:
            json = b",".join(
                b"%b%d%b" % (head, rank, tail)
                for rank, (head, tail) in enumerate(self.parts[start:stop], start + before + 1)
            )
            if len(self.parts) <= MAX_SHORT and len(self.runs) < MAX_RUNS:
                self.runs[key] = json
        return json


class Exploration:
    """Draws a share of the items of newcomers' lists.

    A user gets the same list on every server during a day (UTC), while the popularity of items
    stays the same.
    """

    def __init__(self, share: float, cache_bytes: int) -> None:
        self._share = share
        self._pools: ByteCache[Hashable, Pool] = ByteCache(cache_bytes)

    def n_drawn(self, query: RecommendationQuery) -> int:
        """The number of drawn items in a list; the first item is never drawn."""
        share = self._share if query.exploration is None else query.exploration
        return min(int(share * query.n + 1e-9), query.n - 1)

    def has(self, key: Hashable) -> bool:
        """Whether the cache has the pool of a key."""
        return self._pools.has(key)

    def build(
        self,
        key: Hashable,
        context: RecommendationContext,
        popular: NDArray[np.int64],
        counts: NDArray[np.int64],
        *,
        keep: bool = True,
    ) -> RankedList:
        """A newcomer's list.

        Args:
            key: the key of newcomers' lists, without the user.
            context: the request.
            popular: internal ids in order of popularity.
            counts: the number of users by internal id.
            keep: whether other requests may have the same key.
        """
        pool = self._pools.get(key)
        if pool is None:
            pool = draw_pool(context, popular, counts)
            if keep:
                self._pools.put(key, pool, pool.nbytes + context.query.key_bytes)
        day = int(time.time()) // DAY_SECONDS
        n_drawn, explain = self.n_drawn(context.query), context.query.explain
        return draw_list(pool, n_drawn, f"{day} {context.user}", context.catalogue, explain)


def draw_pool(
    context: RecommendationContext, popular: NDArray[np.int64], counts: NDArray[np.int64]
) -> Pool:
    """The pool of the allowed items: popular items for a list, and other items to draw from."""
    allowed = backfill_items(context)
    chosen = most_popular(popular, allowed, context.query.n)
    allowed[chosen] = False
    ranked = popular[popular < len(allowed)]
    known = ranked[allowed[ranked]][:MAX_KNOWN]
    allowed[ranked] = False
    new = np.flatnonzero(allowed)[::-1][:MAX_NEW]
    others = np.concatenate([known, new])
    users = np.zeros(len(others))
    counted = known < len(counts)  # boosts order items without users, too
    users[: len(known)][counted] = counts[known[counted]]
    explain = context.query.explain
    parts = tuple(_parts(context.catalogue, item, explain) for item in chosen)
    cumulative = np.cumsum(np.sqrt(users + 1.0)).tolist()
    return Pool(tuple(chosen), parts, others, cumulative)


def draw_list(
    pool: Pool, n_drawn: int, seed: str, catalogue: Catalogue, explain: bool = False
) -> RankedList:
    """The list of a seed, with drawn items in at most ``n_drawn`` places."""
    n = len(pool.popular)
    n_drawn = min(n_drawn, len(pool.others), n - 1)
    if n_drawn <= 0:
        return RankedList(pool.run(0, n, 0), pool.popular)
    numbers = _uniform_numbers(seed)
    places = sorted(_draw_places(n, n_drawn, numbers))
    items = _draw_items(pool, n_drawn, numbers)
    json: list[bytes] = []
    ids: list[int] = []
    start = 0
    for before, (place, position) in enumerate(zip(places, items, strict=True)):
        stop = place - before
        if start < stop:
            json.append(pool.run(start, stop, before))
            ids += pool.popular[start:stop]
        item = int(pool.others[position])
        head, tail = _parts(catalogue, item, explain)
        json.append(b"%b%d%b" % (head, place + 1, tail))
        ids.append(item)
        start = stop
    if start < n - n_drawn:
        json.append(pool.run(start, n - n_drawn, n_drawn))
        ids += pool.popular[start : n - n_drawn]
    return RankedList(b",".join(json), tuple(ids))


def _uniform_numbers(seed: str) -> Iterator[float]:
    """Numbers in [0, 1) from an extendable hash, the same numbers for the same seed.

    Seeding a generator of Python or NumPy takes as long as the rest of a list.
    """
    for block in count():
        digest = hashlib.shake_256(f"{block} {seed}".encode("utf-8", "surrogatepass"))
        for number in struct.unpack(_BLOCK, digest.digest(8 * BLOCK_NUMBERS)):
            yield (number >> 11) * 2.0**-53


def _draw_places(n: int, k: int, numbers: Iterator[float]) -> set[int]:
    """``k`` of the places 1 … n − 1, uniformly (Floyd's algorithm)."""
    places: set[int] = set()
    for last in range(n - k, n):
        place = 1 + int(next(numbers) * last)
        places.add(last if place in places else place)
    return places


def _draw_items(pool: Pool, n: int, numbers: Iterator[float]) -> list[int]:
    """``n`` positions in the pool, drawn by weight without replacement."""
    total, last = pool.cumulative[-1], len(pool.cumulative) - 1
    drawn: dict[int, None] = {}
    for _ in range(n * MAX_TRIES):
        drawn[min(bisect_right(pool.cumulative, next(numbers) * total), last)] = None
        if len(drawn) == n:
            return list(drawn)
    # Few are left, or a few of them weigh nearly everything: the first ones that are not drawn yet.
    rest = (position for position in range(len(pool.others)) if position not in drawn)
    return [*drawn, *islice(rest, n - len(drawn))]


def _parts(catalogue: Catalogue, item: int, explain: bool) -> tuple[bytes, bytes]:
    """The item's JSON, before and after its rank."""
    entry = popular_entry(catalogue.external_ids[item], catalogue.titles[item], 0, explain)
    head, _, tail = orjson.dumps(entry).partition(b'"rank":0')
    return head + b'"rank":', tail
