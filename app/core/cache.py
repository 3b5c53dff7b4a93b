"""In-process caches: an LRU bounded in bytes, and single-flight computations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 400  # overhead of an entry: key, links and object headers


class ByteCache(Generic[K, V]):
    """An LRU cache bounded in bytes; 0 bytes disables it. Not safe for several threads.

    No entry becomes stale: keys contain everything that their values depend on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.hits = self.misses = 0
        self._entries: LRUCache[K, tuple[V, int]] = LRUCache(max_bytes, _size)

    def get(self, key: K) -> V | None:
        """The value of a key; None if it is absent. Counts a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Store a value of ``size`` bytes, unless it alone is larger than the cache."""
        if size + ENTRY_BYTES <= self._entries.maxsize:
            self._entries[key] = value, size + ENTRY_BYTES

    def has(self, key: K) -> bool:
        """Whether a key is present, without counting it as a use; safe from other threads."""
        return key in self._entries

    def pop(self, key: K) -> None:
        """Remove a key, if it is present."""
        self._entries.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        """All keys with their values."""
        return [(key, value) for key, (value, _) in self._entries.items()]

    def clear(self) -> None:
        """Remove every key."""
        self._entries.clear()

    @property
    def size(self) -> int:
        """Bytes in use, by the sizes given to `put`."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)


def _size(entry: tuple[Any, int]) -> int:
    return entry[1]


class SingleFlight(Generic[K, V]):
    """Shares one computation of a key among all concurrent callers.

    A computation that no caller waits for any more is cancelled.
    """

    def __init__(self) -> None:
        self._flights: dict[K, tuple[asyncio.Task[V], list[None]]] = {}

    async def run(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result or exception of ``make``, or of the computation in progress for this key."""
        flight = self._flights.get(key)
        # A computation that is done only waits to be removed; its result may be outdated.
        if flight is None or flight[0].done():
            flight = self._start(key, make)
        task, waiting = flight
        waiting.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting and not task.done():
                self._forget(key, task)
                task.cancel()

    def forget(self, key: K) -> None:
        """Let later callers start a new computation."""
        self._flights.pop(key, None)

    def forget_all(self) -> None:
        """Let later callers start a new computation, of any key."""
        self._flights.clear()

    def is_current(self, key: K) -> bool:
        """Whether the running computation is still the one that new callers of the key join."""
        flight = self._flights.get(key)
        return flight is not None and flight[0] is asyncio.current_task()

    def _start(
        self, key: K, make: Callable[[], Coroutine[Any, Any, V]]
    ) -> tuple[asyncio.Task[V], list[None]]:
        task = asyncio.create_task(make())
        flight: tuple[asyncio.Task[V], list[None]] = (task, [])
        self._flights[key] = flight
        task.add_done_callback(lambda done: self._forget(key, done))
        return flight

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight[0] is task:
            del self._flights[key]
