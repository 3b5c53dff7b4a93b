"""What events and preferences say about users and items, and the matrix of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.events.profile import FeedbackPositions, latest_preferences, resolve_feedback
from ncr_core.data.interactions import FloatArray, IntArray, Interactions, UserFeedback

NO_EVENTS = "training needs events: post events to /events, or import a file"
NONE_AVAILABLE = "no event is about an item that may be recommended"
NONE_POSITIVE = "no event is positive by NCR_FEEDBACK, and training needs positive events"


@dataclass(frozen=True, slots=True)
class ResolvedEvents:
    """What the events and preferences of some users say. Ids are internal; by user and time."""

    liked: IntArray
    """(n, 2) user and item."""
    liked_weights: FloatArray
    """(n,)"""
    liked_times: NDArray[np.int64]
    """(n,) in microseconds since 1970."""
    seen: IntArray
    """(s, 2) user and item that is neither liked nor disliked."""
    disliked: IntArray
    """(d, 2)"""
    disliked_weights: FloatArray
    """(d,)"""
    pairs: IntArray
    """(p, 3) user, winner and loser."""
    pair_weights: FloatArray
    """(p,)"""

    @property
    def users(self) -> IntArray:
        """The users that there is something to learn from, ascending."""
        return np.unique(np.concatenate([self.liked[:, 0], self.pairs[:, 0]]))

    @property
    def items(self) -> IntArray:
        """The items that there is something to learn about, ascending."""
        parts = [self.liked[:, 1], self.disliked[:, 1], self.pairs[:, 1:].flatten()]
        return np.unique(np.concatenate(parts))

    def interactions(
        self,
        users: IntArray,
        items: IntArray,
        user_ids: Sequence[str],
        item_ids: Sequence[str],
        *,
        weighted: bool,
    ) -> Interactions:
        """Builds the matrix, with the users' other feedback beside it.

        Args:
            users: `users`, the rows.
            items: Ascending, the columns: at least `items`.
            user_ids: Clients' ids of ``users``.
            item_ids: Clients' ids of ``items``.
            weighted: Whether the matrix has weights.
        """
        seen = _rows(self.seen, users, items)
        disliked = _rows(self.disliked, users, items)
        in_matrix = (disliked >= 0).all(axis=1)
        feedback = UserFeedback(
            seen[(seen >= 0).all(axis=1)],
            disliked[in_matrix],
            self.disliked_weights[in_matrix],
            _rows(self.pairs, users, items),
            self.pair_weights,
        )
        user_rows, item_rows = _rows(self.liked, users, items).T
        return Interactions.from_arrays(
            user_rows,
            item_rows,
            user_ids=user_ids,
            item_ids=item_ids,
            weights=self.liked_weights if weighted else None,
            feedback=feedback if len(feedback) else None,
            times=self.liked_times / 1e6,
        )


def resolve_events(
    events: IntArray,
    weights: FloatArray,
    timestamps: NDArray[np.int64],
    preferences: IntArray,
    preference_weights: FloatArray,
) -> ResolvedEvents:
    """Decides what each user likes, dislikes, has only seen, and prefers.

    Of a user's events about an item the latest that is no mere view counts, see
    `resolve_feedback`; of their preferences about two items the latest.

    Args:
        events: (n, 2) user and item, ordered by user, time and seq as all arrays.
        weights: (n,)
        timestamps: (n,) in microseconds since 1970.
        preferences: (p, 3) user, winner and loser.
        preference_weights: (p,)
    """
    feedback = _resolve_feedback(events, weights)
    stated = latest_preferences(preferences)
    return ResolvedEvents(
        events[feedback.liked],
        feedback.liked_weights,
        timestamps[feedback.liked],
        events[feedback.only_seen],
        events[feedback.disliked],
        feedback.disliked_weights,
        preferences[stated],
        preference_weights[stated],
    )


def _resolve_feedback(events: IntArray, weights: FloatArray) -> FeedbackPositions:
    """What users like, dislike or have only seen, of (n, 2) users and items.

    Where all weights are the same, what is liked repeats as events do.
    """
    if len(weights) and weights[0] > 0 and (weights == weights[0]).all():
        none = np.zeros(0, dtype=np.int64)
        return FeedbackPositions(np.arange(len(events)), weights, none, weights[:0], none)
    items, columns = np.unique(events[:, 1], return_inverse=True)
    return resolve_feedback(events[:, 0] * len(items) + columns, weights)


def _rows(pairs: IntArray, users: IntArray, items: IntArray) -> IntArray:
    """Matrix rows of (n, 1 + k) internal ids, a user and k items; −1 for those not in it."""
    columns = [_positions(users, pairs[:, 0])]
    columns += [_positions(items, column) for column in pairs.T[1:]]
    return np.stack(columns, axis=1)


def _positions(ascending: IntArray, ids: IntArray) -> IntArray:
    """The position of each id among ascending ids; −1 for those that are not among them."""
    position = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.where(ascending[position] == ids, position, -1)
