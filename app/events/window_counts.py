"""Queries for the numbers of users of items in windows of time, as in `popularity_statement`.

Seqs are in the order of commits, so a binary search finds a seq before which all events are older
than a window. The queries do not read events before this seq.
"""

from __future__ import annotations

import sqlalchemy as sa

from app.core.database import Database
from app.core.tables import EVENT_SEQ, current_value
from app.events.event_weights import EventWeights
from app.events.tables import event_time, events, was_moved

COUNT_SECONDS = 600.0
CLOCK_SLACK_US = 600 * 1_000_000  # between the clocks of servers that write events

_FROM = sa.bindparam("seq", type_=sa.BigInteger)
_SINCE, _SPLIT, _UNTIL = (
    sa.bindparam(name, type_=sa.BigInteger) for name in ("since", "split", "until")
)


class WindowCounts:
    """Counts users by item within windows of time."""

    def __init__(self, database: Database, event_weights: EventWeights) -> None:
        self._database = database
        is_positive = event_weights.is_positive(events.c.type, events.c.value)
        # An event that was moved by a merge keeps the time at which it was accepted.
        self._next = (
            sa.select(events.c.seq, events.c.created_at)
            .where(events.c.seq >= _FROM, ~was_moved(events.c.seq))
            .order_by(events.c.seq)
            .limit(1)
        )
        time = event_time()
        # Plus 0: SQLite would otherwise follow the index by item, and look up every event.
        item = (events.c.item_id + sa.literal_column("0")).label("item")
        halves = (sa.case((half, events.c.user_id)) for half in (time >= _SPLIT, time < _SPLIT))
        self._counts = (
            sa.select(item, *(sa.func.count(half.distinct()) for half in halves))
            .where(events.c.seq >= _FROM, time >= _SINCE, time < _UNTIL, is_positive)
            .group_by(item)
        )

    async def users_by_item(self, since: int, split: int, until: int) -> list[tuple[int, int, int]]:
        """Count the distinct users with a positive event about each item in two windows.

        Args:
            since: the beginning of the earlier window, in microseconds since 1970.
            split: the end of the earlier window and the beginning of the later window; equal to
                ``since``: there is no earlier window.
            until: the end of the later window.

        Returns:
            ``(item, users in the later window, users in the earlier window)``.
        """
        seq = await self._first_seq(since - CLOCK_SLACK_US)
        values = {"seq": seq, "since": since, "split": split, "until": until}
        rows = await self._database.fetch_heavy(self._counts.params(values), COUNT_SECONDS)
        return [(row[0], row[1], row[2]) for row in rows]

    async def _first_seq(self, created_at: int) -> int:
        """Return a seq before which all events were accepted earlier than a time."""
        last = int((await self._database.fetch(sa.select(current_value(EVENT_SEQ))))[0][0])
        low, high = 1, last + 1
        while low < high:
            middle = (low + high) // 2
            rows = await self._database.fetch(self._next, {"seq": middle})
            if not rows or rows[0][1] >= created_at:
                high = middle
            else:
                low = rows[0][0] + 1
        return low
