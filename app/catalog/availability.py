"""Availability of items: the times from which and until which lists can have the items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ALWAYS, NEVER_ENDS = 0, 2**62  # µs since 1970: no time of a request is as early, none as late

Int64s = NDArray[np.int64]
_NONE: Int64s = np.zeros(0, np.int64)


class Window(NamedTuple):
    """The time in which lists can have an item, in microseconds since 1970; None: no limit."""

    item: int
    opens: int | None
    closes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Availability:
    """The items that are not always available, in one state of the catalogue."""

    ids: Int64s = field(default_factory=lambda: _NONE)
    """Internal ids, ascending."""
    opens: Int64s = field(default_factory=lambda: _NONE)
    """The time from which each item is available, in microseconds since 1970."""
    closes: Int64s = field(default_factory=lambda: _NONE)
    """The time from which each item is no longer available, in microseconds since 1970."""
    changes: Int64s = field(default_factory=lambda: _NONE)
    """The times at which an item becomes available or unavailable, ascending."""

    def updated(self, windows: Sequence[Window]) -> Availability:
        """The state after a change of items; the same object if no item has limits."""
        limited = [one for one in windows if one.opens is not None or one.closes is not None]
        if not limited and not len(self.ids):
            return self
        changed = np.array([one.item for one in windows], np.int64)
        kept = ~np.isin(self.ids, changed)
        if not limited and kept.all():
            return self
        if len(windows) == 1 and self._has(windows[0]):
            return self
        ids = np.concatenate([self.ids[kept], [one.item for one in limited]]).astype(np.int64)
        opens = [ALWAYS if one.opens is None else one.opens for one in limited]
        closes = [NEVER_ENDS if one.closes is None else one.closes for one in limited]
        all_opens = np.concatenate([self.opens[kept], opens]).astype(np.int64)
        all_closes = np.concatenate([self.closes[kept], closes]).astype(np.int64)
        moments = np.unique(np.concatenate([all_opens, all_closes]))
        moments = moments[(moments > ALWAYS) & (moments < NEVER_ENDS)]
        order = np.argsort(ids, kind="stable")
        return Availability(ids[order], all_opens[order], all_closes[order], moments)

    def _has(self, window: Window) -> bool:
        """Whether an item has exactly these times."""
        place = int(np.searchsorted(self.ids, window.item))
        if place == len(self.ids) or self.ids[place] != window.item:
            return False
        opens, closes = int(self.opens[place]), int(self.closes[place])
        return (opens, closes) == (
            ALWAYS if window.opens is None else window.opens,
            NEVER_ENDS if window.closes is None else window.closes,
        )

    def unavailable(self, at: int) -> Int64s:
        """The ids that are not available at a time, in microseconds since 1970."""
        return self.ids[(self.opens > at) | (self.closes <= at)]

    def last_change(self, at: int) -> int:
        """The latest of ``changes`` up to a time; 0 before the first."""
        before = int(np.searchsorted(self.changes, at, side="right"))
        return int(self.changes[before - 1]) if before else 0

    def next_change(self, at: int) -> int:
        """The first of ``changes`` after a time; ``NEVER_ENDS`` after the last."""
        before = int(np.searchsorted(self.changes, at, side="right"))
        return int(self.changes[before]) if before < len(self.changes) else NEVER_ENDS
