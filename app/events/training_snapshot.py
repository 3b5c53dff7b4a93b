"""Training snapshot: all events and preferences in one consistent state, and their matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.resolved_events import NO_EVENTS, NONE_AVAILABLE, NONE_POSITIVE, resolve_events
from app.events.snapshot_query import EVENT, snapshot_query
from ncr_core.data.interactions import Interactions
from ncr_core.errors import DataError

CheckSizes = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Every event up to ``max_seq``, ordered by user, time and seq. Ids are internal."""

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
        available = np.fromiter(self.item_ids, np.int64, len(self.item_ids))
        existing = np.fromiter(self.user_ids, np.int64, len(self.user_ids))
        mask = np.isin(self.item_id, available) & np.isin(self.user_id, existing)
        if not mask.any():
            raise DataError(NONE_AVAILABLE)
        stated = np.isin(self.preferences[:, 1:3], available).all(axis=1)
        stated &= np.isin(self.preferences[:, 0], existing)
        resolved = resolve_events(
            np.stack([self.user_id[mask], self.item_id[mask]], axis=1),
            self.weight[mask],
            self.timestamp[mask],
            self.preferences[stated, :3],
            self.preference_weight[stated],
        )
        if len(resolved.liked) == 0:
            raise DataError(NONE_POSITIVE)
        users, items = resolved.users, resolved.items
        return resolved.interactions(
            users,
            items,
            [self.user_ids[user] for user in users.tolist()],
            [self.item_ids[item] for item in items.tolist()],
            weighted=bool(np.ptp(resolved.liked_weights) > 0),
        )


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
        rows, filled = np.empty(n_events, EVENT), 0
        for chunk in query.events():
            rows[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    # Sorted here: the database would spill a sort of this size to disk.
    order = np.lexsort((rows["seq"], rows["timestamp"], rows["user_id"]))
    preferences = np.array(preference_rows, dtype=np.int64).reshape(-1, 5)
    timestamp, weight = rows["timestamp"][order], rows["weight"][order]
    # Not after the present: an event in the future would make all others old.
    latest = max((int(t.max()) for t in (timestamp, preferences[:, 3]) if len(t)), default=0)
    now = min(now_us(), latest)
    if event_weights.half_life_days is not None:
        weight *= event_weights.decay(timestamp, now)
    return EventSnapshot(
        user_id=rows["user_id"][order],
        item_id=rows["item_id"][order],
        timestamp=timestamp,
        weight=weight,
        seq=rows["seq"][order],
        preferences=preferences,
        preference_weight=event_weights.decay(preferences[:, 3], now),
        max_seq=max_seq,
        user_ids=user_ids,
        item_ids=item_ids,
    )
