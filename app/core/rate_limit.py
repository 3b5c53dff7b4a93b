"""Rate limits: a token bucket for each caller, in memory or shared by servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cachetools import LRUCache

MAX_CALLERS = 10_000


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """The outcome of taking a token."""

    allowed: bool
    remaining: int
    """Requests that the bucket still permits now."""
    reset: float
    """Seconds until the bucket is full again."""
    retry: float
    """Seconds until the next request is permitted; 0 if one is permitted now."""


class TokenBuckets(Protocol):
    """Token buckets, which hold ``burst`` tokens and gain ``rate`` tokens a second."""

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant | None:
        """Take a token from a caller's bucket; None if the buckets are unavailable."""


class LocalTokenBuckets:
    """Token buckets in the memory of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # An evicted caller begins with a full bucket, like a caller after a long pause.
        self._buckets: LRUCache[str, tuple[float, float]] = LRUCache(MAX_CALLERS)

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant:
        """Take a token from a caller's bucket."""
        now = self._clock()
        tokens, updated = self._buckets.get(caller, (float(burst), now))
        tokens = min(float(burst), tokens + (now - updated) * rate)
        allowed = tokens >= 1
        if allowed:
            tokens -= 1
        self._buckets[caller] = tokens, now
        return token_grant(allowed, tokens, rate, burst)


def token_grant(allowed: bool, tokens: float, rate: float, burst: int) -> TokenGrant:
    """The outcome for a bucket with so many tokens left."""
    retry = 0.0 if tokens >= 1 else (1 - tokens) / rate
    return TokenGrant(allowed, math.floor(tokens), max(0.0, burst - tokens) / rate, retry)


class RateLimiter:
    """Uses the buckets that servers share, or local ones while those are unavailable."""

    def __init__(self, rate: float, burst: int, shared: TokenBuckets | None = None) -> None:
        self._rate = rate
        self._burst = burst
        self._shared = shared
        self._local = LocalTokenBuckets()

    def bounds(self, rate: float | None, burst: int | None) -> tuple[float, int]:
        """A caller's rate and burst: their own, else those of the settings. Rate 0: no limit."""
        if burst is None and rate is None:
            burst = self._burst or None
        rate = self._rate if rate is None else rate
        return rate, max(1, math.ceil(2 * rate)) if burst is None else burst

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant:
        """Take a token from a caller's bucket."""
        if self._shared is not None:
            grant = await self._shared.take(caller, rate, burst)
            if grant is not None:
                return grant
        return await self._local.take(caller, rate, burst)
