"""Lists for newcomers: the popular items, and in some places others, drawn for each user.

Popularity alone shows everyone the same few items, and what is not shown is not taken up. An item
beyond the list's popular ones is drawn with a probability in proportion to √(users + 1): known ones
more often, new ones now and then.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.view import Catalogue
from app.core.cache import ByteCache
from app.recommend.asking import Asked
from app.recommend.entries import RankedList, entry_of
from app.recommend.filling import fillers, most_popular

DAY_SECONDS = 86_400
MOST_KNOWN, MOST_NEW = 10_000, 10_000  # to draw from: the most popular, the newest
SHORT, MOST_RUNS = 20, 64  # lists of which some JSON is kept, and how much
TRIES = 64  # to draw one that is not drawn yet


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """What newcomers' lists are made from, the same for all of them."""

    popular: tuple[int, ...]
    """Ids of the most popular, as many as a list has."""
    parts: tuple[tuple[bytes, bytes], ...]
    """The JSON of each up to its rank, and from there."""
    others: NDArray[np.int64]
    """Ids of the items that others are drawn from."""
    cumulative: Sequence[float]
    """The sums of their weights up to each."""
    runs: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """The JSON of some of the popular that stand together, in short lists."""

    @property
    def nbytes(self) -> int:
        """What it may come to."""
        json = sum(len(head) + len(tail) + 200 for head, tail in self.parts)
        runs = MOST_RUNS * json if len(self.parts) <= SHORT else 0
        return json + runs + self.others.nbytes + 32 * len(self.cumulative)

    def run(self, start: int, stop: int, before: int) -> bytes:
        """The JSON of these of the popular, with so many drawn items before them."""
        key = (start, stop, before)
        found = self.runs.get(key)
        if found is None:
            found = b",".join(
                b"%b%d%b" % (head, rank, tail)
                for rank, (head, tail) in enumerate(self.parts[start:stop], start + before + 1)
            )
            if len(self.parts) <= SHORT and len(self.runs) < MOST_RUNS:
                self.runs[key] = found
        return found


class Exploration:
    """The same user gets the same list all day long (UTC), on every server, as long as the
    popularity of items stays."""

    def __init__(self, share: float, cache_bytes: int) -> None:
        self._share = share
        self._pools: ByteCache[Hashable, Pool] = ByteCache(cache_bytes)

    def places(self, n: int) -> int:
        """How many places of a list of ``n`` go to drawn items; the first one never does."""
        return min(int(self._share * n + 1e-9), n - 1)

    def list_of(
        self,
        key: Hashable,
        asked: Asked,
        popular: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> RankedList:
        """A newcomer's list; ``key`` is all that newcomers' lists depend on but the user.

        ``popular`` are ids in order of popularity, ``counts`` the users of each id.
        """
        pool = self._pools.get(key)
        if pool is None:
            pool = pool_of(asked, popular, counts)
            self._pools.put(key, pool, pool.nbytes + asked.filters.key_bytes)
        day = int(time.time()) // DAY_SECONDS
        places, explain = self.places(asked.filters.n), asked.filters.explain
        return drawn(pool, places, f"{day} {asked.user}", asked.catalogue, explain)


def pool_of(asked: Asked, popular: NDArray[np.int64], counts: NDArray[np.int64]) -> Pool:
    """What the filters leave, in two: the popular that a list begins with, and the others."""
    allowed = fillers(asked)
    chosen = most_popular(popular, allowed, asked.filters.n)
    allowed[chosen] = False
    ranked = popular[popular < len(allowed)]
    known = ranked[allowed[ranked]][:MOST_KNOWN]
    allowed[ranked] = False
    new = np.flatnonzero(allowed)[::-1][:MOST_NEW]
    others = np.concatenate([known, new])
    users = np.zeros(len(others))
    users[: len(known)] = counts[known]
    explain = asked.filters.explain
    parts = tuple(_parts(asked.catalogue, item, explain) for item in chosen)
    cumulative = np.cumsum(np.sqrt(users + 1.0)).tolist()
    return Pool(tuple(chosen), parts, others, cumulative)


def drawn(
    pool: Pool, places: int, seed: str, catalogue: Catalogue, explain: bool = False
) -> RankedList:
    """The list of whom this seed stands for, with so many places given to drawn items."""
    n = len(pool.popular)
    places = min(places, len(pool.others), n - 1)
    if places <= 0:
        return RankedList(pool.run(0, n, 0), pool.popular)
    numbers = _numbers(seed)
    where = sorted(_some_places(n, places, numbers))
    items = _without_repeats(pool, places, numbers)
    json: list[bytes] = []
    ids: list[int] = []
    start = 0
    for before, (place, at) in enumerate(zip(where, items, strict=True)):
        stop = place - before
        if start < stop:
            json.append(pool.run(start, stop, before))
            ids += pool.popular[start:stop]
        item = int(pool.others[at])
        head, tail = _parts(catalogue, item, explain)
        json.append(b"%b%d%b" % (head, place + 1, tail))
        ids.append(item)
        start = stop
    if start < n - places:
        json.append(pool.run(start, n - places, places))
        ids += pool.popular[start : n - places]
    return RankedList(b",".join(json), tuple(ids))


def _numbers(seed: str) -> Iterator[float]:
    """Numbers in [0, 1), always the same ones for a seed.

    Knuth's linear congruential generator, of which the upper bits are taken: to seed one of
    Python's own takes longer than all the rest of a list.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    state = int.from_bytes(digest, "big")
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) * 2.0**-53


def _some_places(n: int, k: int, numbers: Iterator[float]) -> set[int]:
    """``k`` of the places 1 … n − 1, any of them as probably (Floyd's algorithm)."""
    found: set[int] = set()
    for most in range(n - k, n):
        place = 1 + int(next(numbers) * most)
        found.add(most if place in found else place)
    return found


def _without_repeats(pool: Pool, n: int, numbers: Iterator[float]) -> list[int]:
    """``n`` places of the pool, each drawn by its weight from those that are left."""
    total, last = pool.cumulative[-1], len(pool.cumulative) - 1
    found: dict[int, None] = {}
    for _ in range(n * TRIES):
        found[min(bisect_right(pool.cumulative, next(numbers) * total), last)] = None
        if len(found) == n:
            return list(found)
    # Few are left, or a few of them weigh nearly everything: the first ones that are not drawn yet.
    rest = (at for at in range(len(pool.others)) if at not in found)
    return [*found, *(at for at, _ in zip(rest, range(n - len(found)), strict=False))]


def _parts(catalogue: Catalogue, item: int, explain: bool) -> tuple[bytes, bytes]:
    """The item's JSON before its rank and after it."""
    made = entry_of(catalogue, item, 0, "popular", because=() if explain else None)
    head, _, tail = orjson.dumps(made).partition(b'"rank":0')
    return head + b'"rank":', tail
