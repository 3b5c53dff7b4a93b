"""A cache of figures that take long to count, so that frequent requests cost little time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from app.core.cache import SingleFlight

T = TypeVar("T")

MIN_SECONDS = 0.02
"""The counting time below which a figure is counted anew each time."""
TIMES_AS_LONG = 100.0
"""The lifetime of a figure in counting times, so that counts take at most 1 % of the time."""
MAX_FIGURES = 64


class KeptFigures:
    """The figures of one server. For one event loop."""

    def __init__(self) -> None:
        self._flights: SingleFlight[Hashable, Any] = SingleFlight()
        self._kept: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._forgotten = 0

    async def get(self, key: Hashable, count: Callable[[], Awaitable[T]]) -> T:
        """The result of ``count``, or its kept result for this key."""
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() < kept[0]:
            found: T = kept[1]
            return found

        async def timed() -> T:
            began, forgotten = time.monotonic(), self._forgotten
            value = await count()
            took = time.monotonic() - began
            self._kept.pop(key, None)
            # What changed while it was counted may be missing.
            if took >= MIN_SECONDS and forgotten == self._forgotten:
                self._kept[key] = time.monotonic() + TIMES_AS_LONG * took, value
                if len(self._kept) > MAX_FIGURES:
                    self._kept.popitem(last=False)
            return value

        counted: T = await self._flights.run(key, timed)
        return counted

    def forget(self, key: Hashable) -> None:
        """Drop the figure of a key: the next request counts anew."""
        self._forgotten += 1
        self._kept.pop(key, None)
        self._flights.forget(key)
