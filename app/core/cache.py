"""Caches within the process: bounded in bytes, and one computation a key at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 400  # of keys, links and headers: Python objects are not small


class ByteCache(Generic[K, V]):
    """Keeps what was used last, up to a number of bytes. 0 keeps nothing. Not for several threads.

    Nothing is ever stale in it: its users put into the key all that the value depends on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.hits = self.misses = 0
        self._entries: LRUCache[K, tuple[V, int]] = LRUCache(max_bytes, _size)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keeps a value of ``size`` bytes, unless it alone is larger than the cache."""
        if size + ENTRY_BYTES <= self._entries.maxsize:
            self._entries[key] = value, size + ENTRY_BYTES

    def has(self, key: K) -> bool:
        """Without counting or using it; other threads may ask that much."""
        return key in self._entries

    def pop(self, key: K) -> None:
        self._entries.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        return [(key, value) for key, (value, _) in self._entries.items()]

    def clear(self) -> None:
        self._entries.clear()

    @property
    def size(self) -> int:
        """Bytes in use, by the sizes that were given."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)


def _size(entry: tuple[Any, int]) -> int:
    return entry[1]


class SingleFlight(Generic[K, V]):
    """Who asks for a key that is just being computed waits for that result.

    A computation that nobody waits for any more is cancelled.
    """

    def __init__(self) -> None:
        self._flights: dict[K, tuple[asyncio.Task[V], list[None]]] = {}

    async def run(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result of ``make``, or of the one under way for this key; its exception, too."""
        flight = self._flights.get(key)
        # One that is done is only waiting to be forgotten: its result is of the past.
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
        """Who asks from now on gets a computation that begins now."""
        self._flights.pop(key, None)

    def forget_all(self) -> None:
        self._flights.clear()

    def is_current(self, key: K) -> bool:
        """Within a computation: whether it has not been forgotten meanwhile."""
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
