"""In-process caches: an LRU bounded in bytes, and single-flight computations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

from cachetools import Cache, LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 400  # overhead of an entry: key, links and object headers


class ByteCache(Generic[K, V]):
    """An LRU cache with a limit in bytes, for any thread. A limit of 0 bytes disables the cache.

    No entry expires. A key contains all that its value depends on, or the owner of the cache
    removes stale entries, as `ProfileCache` does.
    """

    def __init__(self, max_bytes: int) -> None:
        self.hits = self.misses = 0
        self._entries: LRUCache[K, tuple[V, int]] = LRUCache(max_bytes, _size)
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """The value of a key; None if the key is absent. Counts a hit or a miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Store a value of ``size`` bytes, unless it alone is larger than the cache."""
        if size + ENTRY_BYTES <= self._entries.maxsize:
            with self._lock:
                self._entries[key] = value, size + ENTRY_BYTES

    def has(self, key: K) -> bool:
        """Whether a key is present, without counting the call as a use."""
        return key in self._entries

    def pop(self, key: K) -> None:
        """Remove a key, if it is present."""
        with self._lock:
            self._entries.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        """All keys with their values, without counting the call as a use."""
        with self._lock:
            return [(key, Cache.__getitem__(self._entries, key)[0]) for key in self._entries]

    def clear(self) -> None:
        """Remove every key."""
        with self._lock:
            self._entries.clear()

    @property
    def size(self) -> int:
        """Bytes in use: the sizes given to `put`, plus ``ENTRY_BYTES`` for each entry."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)


def _size(entry: tuple[Any, int]) -> int:
    return entry[1]


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    """A computation in progress."""

    task: asyncio.Task[V]
    waiting: int = 0
    """The number of callers that wait for the result."""
    is_slow: bool = False
    on_slow: list[Callable[[], None]] = field(default_factory=list)


class SingleFlight(Generic[K, V]):
    """Shares one computation of a key among all concurrent callers.

    When the last caller stops waiting, the computation is cancelled.

    Args:
        keep: called with the key and each result, unless the key was forgotten meanwhile.
    """

    def __init__(self, keep: Callable[[K, V], None] = lambda key, value: None) -> None:
        self._keep = keep
        self._flights: dict[K, _Flight[V]] = {}

    async def run(
        self,
        key: K,
        make: Callable[[], Coroutine[Any, Any, V]],
        on_slow: Callable[[], None] | None = None,
    ) -> V:
        """The result or exception of ``make``, or of the computation in progress for this key.

        Args:
            key: names the computation.
            make: begins the computation.
            on_slow: called when the computation calls `turn_slow`, and at once if it already has.
        """
        flight = self._flights.get(key)
        # A computation that is done only waits to be removed; its result may be outdated.
        if flight is None or flight.task.done():
            flight = self._start(key, make)
        if on_slow is not None:
            flight.on_slow.append(on_slow)
            if flight.is_slow:
                on_slow()
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()

    def turn_slow(self, key: K) -> None:
        """Tell all present and later callers that the running computation is going to wait."""
        if self.is_current(key):
            flight = self._flights[key]
            flight.is_slow = True
            for on_slow in flight.on_slow:
                on_slow()

    def forget(self, key: K) -> None:
        """Let later callers start a new computation."""
        self._flights.pop(key, None)

    def forget_all(self) -> None:
        """Let later callers start a new computation, of any key."""
        self._flights.clear()

    def is_current(self, key: K) -> bool:
        """Whether the running computation is still the one that new callers of the key join."""
        flight = self._flights.get(key)
        return flight is not None and flight.task is asyncio.current_task()

    def _start(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> _Flight[V]:
        flight = self._flights[key] = _Flight(asyncio.create_task(make()))
        flight.task.add_done_callback(lambda done: self._forget(key, done))
        return flight

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
            if task.done() and not task.cancelled() and task.exception() is None:
                self._keep(key, task.result())
