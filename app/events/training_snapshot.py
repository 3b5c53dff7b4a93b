"""Training snapshot: all events and preferences in one consistent state, and their matrix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.resolved_events import (
    NO_EVENTS,
    NONE_AVAILABLE,
    NONE_POSITIVE,
    ResolvedEvents,
    positions,
    resolve_events,
)
from app.events.snapshot_query import EVENT, snapshot_query
from ncr_core.data.interactions import FloatArray, IntArray, Interactions, UserFeedback
from ncr_core.errors import DataError

CheckSizes = Callable[[int, int, int], None]

BLOCK_EVENTS = 2**20
"""The events that are resolved at once. A block has all events of its users, and may be longer."""


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Every event up to ``max_seq``, ordered by user, time and seq. Ids are internal.

    Those of some users alone after `of_users`.
    """

    user_id: NDArray[np.int64]
    """(n,) like every array of events."""
    item_id: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    """Microseconds since 1970, UTC."""
    weight: NDArray[np.float32]
    """The event's weight, see `EventWeights`, decayed to the latest event or preference."""
    seq: NDArray[np.int64]
    preferences: NDArray[np.int64]
    """(P, 5) stated preferences in the same order: user, winner, loser, timestamp, seq."""
    preference_weight: NDArray[np.float32]
    """(P,) the decay of each preference, at most 1."""
    max_seq: int
    user_ids: dict[int, str]
    """Clients' ids by internal ids, of all users but throw-away ones."""
    item_ids: dict[int, str]
    """Clients' ids by internal ids, of all items but deleted ones."""

    def __len__(self) -> int:
        return len(self.seq)

    def interactions(self) -> Interactions:
        """Builds the matrix of interactions, with the users' other feedback.

        Of a user's events about an item, the latest with a non-zero weight counts, see
        `resolve_feedback`. The matrix leaves out users and items without a client's id, and users
        without a like or a preference.

        Raises:
            DataError: No user likes an available item.
        """
        if len(self) == 0:
            raise DataError(NO_EVENTS)
        available = np.sort(np.fromiter(self.item_ids, np.int64, len(self.item_ids)))
        existing = np.sort(np.fromiter(self.user_ids, np.int64, len(self.user_ids)))
        matrix = _Matrix(available)
        any_available = False
        for events, stated in self._blocks():
            mask = positions(available, self.item_id[events]) >= 0
            mask &= positions(existing, self.user_id[events]) >= 0
            any_available |= bool(mask.any())
            preferences = self.preferences[stated]
            kept = (positions(available, preferences[:, 1:3]) >= 0).all(axis=1)
            kept &= positions(existing, preferences[:, 0]) >= 0
            resolved = resolve_events(
                np.stack([self.user_id[events][mask], self.item_id[events][mask]], axis=1),
                self.weight[events][mask],
                self.timestamp[events][mask],
                preferences[kept, :3],
                self.preference_weight[stated][kept],
            )
            matrix.append(resolved, self.user_ids)
        if not any_available:
            raise DataError(NONE_AVAILABLE)
        return matrix.finish(self.item_ids)

    def of_users(self, user_ids: Collection[str]) -> EventSnapshot:
        """The events and preferences of some users alone, by the clients' ids of the users."""
        wanted = set(user_ids)
        kept = {user: name for user, name in self.user_ids.items() if name in wanted}
        ids = np.fromiter(kept, np.int64, len(kept))
        events = np.isin(self.user_id, ids)
        stated = np.isin(self.preferences[:, 0], ids)
        return replace(
            self,
            user_id=self.user_id[events],
            item_id=self.item_id[events],
            timestamp=self.timestamp[events],
            weight=self.weight[events],
            seq=self.seq[events],
            preferences=self.preferences[stated],
            preference_weight=self.preference_weight[stated],
            user_ids=kept,
        )

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """Ranges of events and of preferences, each of all rows of some users."""
        start = stated = 0
        while start < len(self):
            end, last = start + BLOCK_EVENTS, stated
            if end < len(self):
                user = self.user_id[end]
                end = int(np.searchsorted(self.user_id, user, "right"))
                last = int(np.searchsorted(self.preferences[:, 0], user, "right"))
            if end >= len(self):
                last = len(self.preferences)
            yield slice(start, end), slice(stated, last)
            start, stated = end, last


class _Matrix:
    """The matrix of interactions of users in ascending order, made of some users at a time."""

    def __init__(self, items: IntArray) -> None:
        """``items`` are the ascending internal ids of the items that may be in the matrix."""
        self._items = items
        self._all_columns = np.arange(len(items))
        self._names = [""] * len(items)
        self._used = np.zeros(len(items), dtype=np.bool_)
        self._user_ids: list[str] = []
        self._lengths: list[IntArray] = []
        self._columns: list[IntArray] = []
        self._weights: list[FloatArray] = []
        self._times: list[NDArray[np.float64]] = []
        self._feedback: list[UserFeedback] = []

    def append(self, resolved: ResolvedEvents, names: Mapping[int, str]) -> None:
        """Adds users with larger internal ids than the users before."""
        users = resolved.users
        self._used[np.searchsorted(self._items, resolved.items)] = True
        if len(users) == 0:
            return
        user_ids = [names[user] for user in users.tolist()]
        part = resolved.interactions(users, self._items, user_ids, self._names, weighted=True)
        assert part.weights is not None  # noqa: S101
        assert part.times is not None  # noqa: S101
        if part.feedback is not None:
            rows = np.arange(len(users)) + len(self._user_ids)
            self._feedback.append(part.feedback.reindexed(rows, self._all_columns))
        self._user_ids += user_ids
        self._lengths.append(np.diff(part.indptr))
        self._columns.append(part.items)
        self._weights.append(part.weights)
        self._times.append(part.times)

    def finish(self, names: Mapping[int, str]) -> Interactions:
        """The matrix, without the items that no user likes, dislikes or prefers to another.

        Raises DataError if no user likes an item.
        """
        lengths = _joined(self._lengths, np.int64)
        if not lengths.any():
            raise DataError(NONE_POSITIVE)
        new_columns = np.where(self._used, np.cumsum(self._used) - 1, -1)
        weights = _joined(self._weights, np.float32)
        rows = np.arange(len(self._user_ids))
        feedback = [part.reindexed(rows, new_columns) for part in self._feedback]
        return Interactions(
            np.concatenate([[0], np.cumsum(lengths)]),
            new_columns[_joined(self._columns, np.int64)],
            self._user_ids,
            [names[item] for item in self._items[self._used].tolist()],
            weights if np.ptp(weights) > 0 else None,
            _joined_feedback(feedback),
            _joined(self._times, np.float64),
        )


def _joined(parts: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """All parts behind one another. The list is empty afterwards, to free its memory."""
    joined = np.concatenate([np.empty(0, dtype), *parts])
    parts.clear()
    return joined


def _joined_feedback(parts: Sequence[UserFeedback]) -> UserFeedback | None:
    if not parts:
        return None
    names = [field.name for field in fields(UserFeedback)]
    joined = UserFeedback(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )
    return joined if len(joined) else None


def read_snapshot(
    settings: Settings, check_sizes: CheckSizes = lambda *sizes: None
) -> EventSnapshot:
    """Read the snapshot. The function blocks, so callers need a thread.

    Args:
        settings: the settings of the database and of the event weights.
        check_sizes: called with the numbers of events, users and items before the events are read.
            An error that the function raises ends the reading.
    """
    event_weights = EventWeights.from_settings(settings)
    with snapshot_query(settings) as query:
        n_events, n_users, n_items = query.sizes()
        check_sizes(n_events, n_users, n_items)
        max_seq, user_ids, item_ids = query.max_seq(), dict(query.users()), dict(query.items())
        preference_rows = list(query.preferences())
        # A column at a time, so that the sorted ones are never beside all of the others.
        columns = {name: np.empty(n_events, EVENT[name]) for name in EVENT.names or ()}
        filled = 0
        for chunk in query.events():
            for name in columns:
                columns[name][filled : filled + len(chunk)] = chunk[name]
            filled += len(chunk)
    # Sorted here: the database would spill a sort of this size to disk.
    order = np.lexsort((columns["seq"], columns["timestamp"], columns["user_id"]))
    for name in columns:
        columns[name] = columns[name][order]
    del order
    preferences = np.array(preference_rows, dtype=np.int64).reshape(-1, 5)
    timestamp, weight = columns["timestamp"], columns["weight"]
    # Not after the present: an event in the future would make all others old.
    latest = max((int(t.max()) for t in (timestamp, preferences[:, 3]) if len(t)), default=0)
    now = min(now_us(), latest)
    if event_weights.half_life_days is not None:
        weight *= event_weights.decay(timestamp, now)
    return EventSnapshot(
        user_id=columns["user_id"],
        item_id=columns["item_id"],
        timestamp=timestamp,
        weight=weight,
        seq=columns["seq"],
        preferences=preferences,
        preference_weight=event_weights.decay(preferences[:, 3], now),
        max_seq=max_seq,
        user_ids=user_ids,
        item_ids=item_ids,
    )
