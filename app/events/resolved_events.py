"""The feedback that events and preferences resolve to, and the matrix of interactions."""

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
    """The resolved feedback of some users, by user and time. Ids are internal."""

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
        """The users with a like or a preference, ascending."""
        return np.unique(np.concatenate([self.liked[:, 0], self.pairs[:, 0]]))

    @property
    def items(self) -> IntArray:
        """The items of likes, dislikes and preferences, ascending."""
        parts = [self.liked[:, 1], self.disliked[:, 1], self.pairs[:, 1:].flatten()]
        return np.unique(np.concatenate(parts))

    def of_users(self, users: IntArray) -> ResolvedEvents:
        """The feedback of these users alone."""
        liked, seen, disliked, pairs = (
            np.isin(part[:, 0], users)
            for part in (self.liked, self.seen, self.disliked, self.pairs)
        )
        return ResolvedEvents(
            self.liked[liked],
            self.liked_weights[liked],
            self.liked_times[liked],
            self.seen[seen],
            self.disliked[disliked],
            self.disliked_weights[disliked],
            self.pairs[pairs],
            self.pair_weights[pairs],
        )

    def interactions(
        self,
        users: IntArray,
        items: IntArray,
        user_ids: Sequence[str],
        item_ids: Sequence[str],
        *,
        weighted: bool,
    ) -> Interactions:
        """Builds the matrix of interactions, with the users' other feedback.

        Args:
            users: The rows of the matrix: the property `users`.
            items: The columns of the matrix, ascending: at least the property `items`.
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
    """Decides which items each user likes, dislikes, has only seen, and prefers.

    Of a user's events about an item, the latest with a non-zero weight counts, see
    `resolve_feedback`. Of a user's preferences between two items, the latest counts.

    Args:
        events: (n, 2) user and item. All arrays are in the order of user, time and seq.
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
    """The events that decide about each user and item, of (n, 2) users and items.

    If all weights are equal and positive, every event is a like, repeated events included.
    """
    if len(weights) and weights[0] > 0 and (weights == weights[0]).all():
        none = np.zeros(0, dtype=np.int64)
        return FeedbackPositions(np.arange(len(events)), weights, none, weights[:0], none)
    items, columns = np.unique(events[:, 1], return_inverse=True)
    return resolve_feedback(events[:, 0] * len(items) + columns, weights)


def _rows(pairs: IntArray, users: IntArray, items: IntArray) -> IntArray:
    """(n, 1 + k) positions in the matrix of a user and k items; −1 for an id outside the matrix."""
    columns = [positions(users, pairs[:, 0])]
    columns += [positions(items, column) for column in pairs.T[1:]]
    return np.stack(columns, axis=1)


def positions(ascending: IntArray, ids: IntArray) -> IntArray:
    """The position of each id among ascending ids; −1 for a missing id."""
    if len(ascending) == 0:
        return np.full(ids.shape, -1)
    position = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.where(ascending[position] == ids, position, -1)
