"""Times of a user's last events by type and item, for rules by type and age.

A profile has no event types, and lacks some events of a long history. The service reads a seen
history only if a rule needs the history. Later reads of a long history add only the new events.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray

from app.core.cache import ByteCache, SingleFlight
from app.core.database import Database
from app.events.event_weights import EventWeights
from app.events.profile import Profile
from app.events.seen_rule import NEVER_BACK, SeenRule
from app.events.tables import event_time, events, retractions, users

IntArray = NDArray[np.int64]

MAX_RULES = 4  # whose times of return are kept of a user
MIN_KEPT_ROWS = 1_000
"""Histories with fewer rows are read anew after a change of the user."""
MAX_ADDED = 10_000  # rows, before a history is read anew
MAX_BEHIND = 500_000  # seqs: retractions further back may be gone
HISTORY_BYTES = 800  # of one without its arrays
_AFTER = sa.bindparam("after", type_=sa.BigInteger)
_USER = sa.bindparam("user_id", type_=sa.BigInteger)
_RETRACTED = sa.select(
    sa.exists().where(retractions.c.seq > _AFTER, retractions.c.user_id == _USER)
)


@dataclass(frozen=True, slots=True, eq=False)
class ReturnTimes:
    """The times at which a user's items may come back, the earliest first."""

    items: IntArray
    """(k,) internal ids, each once."""
    times: IntArray
    """(k,) in microseconds since 1970; at least ``NEVER_BACK`` for items that stay out."""

    def returned(self, at_us: int) -> int:
        """The number of items that are back at a time, in microseconds since 1970."""
        return int(np.searchsorted(self.times, at_us, side="right"))


@dataclass(frozen=True, slots=True, eq=False)
class SeenHistory:
    """The latest event of each type about each item.

    An item can have several rows of a type. The row with the latest time counts.
    """

    last_seq: int
    """The seq of the user's last change at the time of reading."""
    types: tuple[str, ...]
    kinds: IntArray
    """(k,) positions in ``types``."""
    items: IntArray
    """(k,) internal ids."""
    times: IntArray
    """(k,) in microseconds since 1970."""
    first_seqs: IntArray
    """(k,) the seq of the first event that a row stands for."""
    negative: NDArray[np.bool_]
    """(k,) whether the events are negative feedback."""
    added: int = 0
    """The number of rows that later reads added."""
    _by_rule: dict[Any, ReturnTimes] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, and of the return times computed from them, in bytes."""
        names = sum(60 + 4 * len(name) for name in self.types)
        return names + (33 + 16 * MAX_RULES) * len(self.items)

    def until(self, seq: int) -> SeenHistory:
        """The history at an earlier seq: the rows whose first event is not after that seq."""
        then = self.first_seqs <= seq
        return SeenHistory(
            seq,
            self.types,
            self.kinds[then],
            self.items[then],
            self.times[then],
            self.first_seqs[then],
            self.negative[then],
        )

    def plus(self, later: SeenHistory) -> SeenHistory:
        """The history with the rows of a later one."""
        types = tuple(dict.fromkeys(self.types + later.types))
        position = np.array([types.index(name) for name in later.types], dtype=np.int64)
        return SeenHistory(
            later.last_seq,
            types,
            np.concatenate([self.kinds, position[later.kinds]]),
            np.concatenate([self.items, later.items]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.first_seqs, later.first_seqs]),
            np.concatenate([self.negative, later.negative]),
            self.added + len(later.items),
        )

    def return_times(self, rule: SeenRule, disliked: IntArray) -> ReturnTimes:
        """The return times by a rule; ``disliked`` (d,) has the items that the user dislikes."""
        found = self._by_rule.get(rule.key)
        if found is None:
            found = self._return_times(rule, disliked)
            if len(self._by_rule) >= MAX_RULES:
                del self._by_rule[next(iter(self._by_rule))]
            self._by_rule[rule.key] = found
        return found

    def _return_times(self, rule: SeenRule, disliked: IntArray) -> ReturnTimes:
        if not len(self.items):
            return ReturnTimes(self.items, self.times)
        ages = np.array([rule.age(name) for name in self.types], dtype=np.int64)[self.kinds]
        is_named = np.array([name in rule.types for name in self.types])[self.kinds]
        # What a rule says of all other types is not said of dislikes.
        stays = self.negative & ~is_named & np.isin(self.items, disliked)
        times = np.where(stays | (ages == NEVER_BACK), NEVER_BACK, self.times + ages)
        order = np.argsort(self.items, kind="stable")
        items = self.items[order]
        starts = np.flatnonzero(np.diff(items, prepend=-1))
        latest = np.maximum.reduceat(times[order], starts)
        by_time = np.argsort(latest, kind="stable")
        return ReturnTimes(items[starts][by_time], latest[by_time])


class SeenHistories:
    """Histories of users, kept in memory until the user changes.

    Args:
        database: the database of the events.
        event_weights: the weights, which tell negative events.
        max_bytes: the memory for histories, in bytes.
    """

    def __init__(self, database: Database, event_weights: EventWeights, max_bytes: int) -> None:
        self._database = database
        self._statement = _statement(event_weights)
        self._cache: ByteCache[str, tuple[int, SeenHistory]] = ByteCache(max_bytes)
        self._reads: SingleFlight[tuple[str, int, int], SeenHistory] = SingleFlight()

    async def get(self, user: str, profile: Profile) -> SeenHistory:
        """The history of a user with events, at the state of the profile or a later one.

        Args:
            user: the client's id.
            profile: the profile of the user, without a basket.
        """
        user_id, last_seq = profile.user_id, profile.last_seq
        assert user_id is not None  # noqa: S101 - there are events
        kept = self._cache.get(user)
        known = kept[1] if kept is not None and kept[0] == user_id else None
        if known is not None and known.last_seq >= last_seq:
            return known
        history = await self._reads.run(
            (user, user_id, last_seq), lambda: self._read(user_id, last_seq, known)
        )
        self._cache.put(user, (user_id, history), HISTORY_BYTES + history.nbytes)
        return history

    async def _read(self, user_id: int, last_seq: int, known: SeenHistory | None) -> SeenHistory:
        if (
            known is not None
            and len(known.items) >= MIN_KEPT_ROWS
            and known.added < MAX_ADDED
            and last_seq - known.last_seq < MAX_BEHIND
        ):
            later = await self._rows(user_id, known.last_seq)
            # Afterwards: a deletion before those rows were read is there by now.
            since = {"user_id": user_id, "after": known.last_seq}
            if not (await self._database.fetch(_RETRACTED, since))[0][0]:
                if not len(later.items):  # a stated preference
                    return replace(known, last_seq=last_seq)
                return known.plus(later)
        return await self._rows(user_id, 0)

    async def _rows(self, user_id: int, after: int) -> SeenHistory:
        """The history of the events after a seq."""
        rows = await self._database.fetch(self._statement, {"user_id": user_id, "after": after})
        types = tuple(dict.fromkeys(row[0] for row in rows))
        sizes = [row[2].count(",") + 1 for row in rows]
        kinds = np.repeat(np.array([types.index(row[0]) for row in rows], dtype=np.int64), sizes)
        negative = np.repeat(np.array([bool(row[1]) for row in rows], dtype=np.bool_), sizes)
        items, times, seqs = (
            np.array(orjson.loads(f"[{','.join(row[column] for row in rows)}]"), dtype=np.int64)
            for column in (2, 3, 4)
        )
        last_seq = rows[0][5] if rows else after
        return SeenHistory(last_seq, types, kinds, items, times, seqs, negative)


def _statement(event_weights: EventWeights) -> sa.Select[Any]:
    """The query for a user's events after a seq: a row for each type and ``is_negative``.

    Items, times and seqs are numbers with commas between them. The last column is the user's last
    seq.
    """
    weight = event_weights.expression(events.c.type, events.c.value)
    is_negative = sa.case((weight < 0, 1), else_=0).label("is_negative")
    each = (
        sa.select(events.c.type, is_negative, events.c.item_id, event_time(), events.c.seq)
        .where(events.c.user_id == _USER, events.c.seq > _AFTER)
        .subquery()
    )
    latest = (
        sa.select(
            each.c.type,
            each.c.is_negative,
            each.c.item_id,
            sa.func.max(each.c.timestamp).label("time"),
            sa.func.min(each.c.seq).label("seq"),
        )
        .group_by(each.c.type, each.c.is_negative, each.c.item_id)
        .subquery()
    )
    last_seq = sa.select(users.c.last_seq).where(users.c.id == _USER).scalar_subquery()
    numbers = (latest.c.item_id, latest.c.time, latest.c.seq)
    return sa.select(
        latest.c.type,
        latest.c.is_negative,
        *(sa.func.aggregate_strings(sa.cast(column, sa.Text), ",") for column in numbers),
        last_seq,
    ).group_by(latest.c.type, latest.c.is_negative)
