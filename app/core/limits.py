"""How many requests a caller may make: a token bucket for each, in memory or shared by servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cachetools import LRUCache

CALLERS = 10_000


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of one request."""

    allowed: bool
    remaining: int
    """Requests that would be let in now."""
    reset: float
    """Seconds until the bucket is full again."""
    retry: float
    """Seconds until the next request is let in; 0 when one is."""


class Buckets(Protocol):
    """Takes a token from a caller's bucket, which holds ``burst`` and gains ``rate`` a second."""

    async def take(self, caller: str, rate: float, burst: int) -> Taken | None:
        """None: it cannot be said."""


class LocalBuckets:
    """In this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Who was forgotten begins with a full bucket, as who has not come for long would have.
        self._buckets: LRUCache[str, tuple[float, float]] = LRUCache(CALLERS)

    async def take(self, caller: str, rate: float, burst: int) -> Taken:
        now = self._clock()
        tokens, at = self._buckets.get(caller, (float(burst), now))
        tokens = min(float(burst), tokens + (now - at) * rate)
        allowed = tokens >= 1
        if allowed:
            tokens -= 1
        self._buckets[caller] = tokens, now
        return verdict(allowed, tokens, rate, burst)


def verdict(allowed: bool, tokens: float, rate: float, burst: int) -> Taken:
    """What a bucket with so many tokens left means."""
    retry = 0.0 if tokens >= 1 else (1 - tokens) / rate
    return Taken(allowed, math.floor(tokens), max(0.0, burst - tokens) / rate, retry)


class Limiter:
    """Asks the shared buckets, and the local ones where those do not answer."""

    def __init__(self, rate: float, burst: int, shared: Buckets | None = None) -> None:
        self._rate = rate
        self._burst = burst
        self._shared = shared
        self._local = LocalBuckets()

    def bounds(self, rate: float | None, burst: int | None) -> tuple[float, int]:
        """A caller's rate and burst: their own, else the service's. A rate of 0 has no bound."""
        if burst is None and rate is None:
            burst = self._burst or None
        rate = self._rate if rate is None else rate
        return rate, max(1, math.ceil(2 * rate)) if burst is None else burst

    async def take(self, caller: str, rate: float, burst: int) -> Taken:
        if self._shared is not None:
            taken = await self._shared.take(caller, rate, burst)
            if taken is not None:
                return taken
        return await self._local.take(caller, rate, burst)
