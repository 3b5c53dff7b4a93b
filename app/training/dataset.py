"""The data set of a training: a snapshot of the events, turned into an interaction matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.events.profile import FeedbackPositions, latest_preferences, resolve_feedback
from app.events.training_snapshot import EventSnapshot
from ncr_core.data import Interactions
from ncr_core.data.interactions import BoolArray, FloatArray, IntArray, UserFeedback, row_indices
from ncr_core.errors import DataError


@dataclass(frozen=True)
class TrainingEvents:
    """Events and stated preferences, and the clients' ids of their users and items."""

    snapshot: EventSnapshot
    user_ids: dict[int, str]
    """Clients' ids by internal ids. Users who were erased since the snapshot are missing."""
    item_ids: dict[int, str]
    """Of the items that may be recommended: all but deleted ones."""

    def interactions(self) -> Interactions:
        """Builds the matrix of positive interactions, with the users' other feedback beside it.

        Of a user's events about an item the latest that is no mere view counts, see
        `resolve_feedback`. Users and items without a client's id are left out, and so are users
        without anything to learn from.

        Raises:
            DataError: Nothing is left to learn from.
        """
        snapshot = self.snapshot
        if len(snapshot) == 0:
            raise DataError(
                "there are no events to learn from: post some to /events, or import a file"
            )
        available = np.fromiter(self.item_ids, np.int64, len(self.item_ids))
        existing = np.fromiter(self.user_ids, np.int64, len(self.user_ids))
        mask = np.isin(snapshot.item_id, available) & np.isin(snapshot.user_id, existing)
        if not mask.any():
            raise DataError("no event is about an item that may be recommended")
        events = np.stack([snapshot.user_id[mask], snapshot.item_id[mask]], axis=1)
        feedback = _resolve_feedback(events, snapshot.weight[mask])
        if len(feedback.liked) == 0:
            raise DataError("no event is positive by NCR_FEEDBACK: there is nothing to learn from")
        liked, disliked = events[feedback.liked], events[feedback.disliked]
        preferences = snapshot.preferences
        usable = np.isin(preferences[:, 1:3], available).all(axis=1)
        rows = np.flatnonzero(usable & np.isin(preferences[:, 0], existing))
        rows = rows[latest_preferences(preferences[rows, :3])]
        pairs, pair_weights = preferences[rows, :3], snapshot.preference_weight[rows]

        users = np.unique(np.concatenate([liked[:, 0], pairs[:, 0]]))
        items = np.unique(np.concatenate([liked[:, 1], disliked[:, 1], pairs[:, 1:].flatten()]))
        seen = _rows(events[feedback.only_seen], users, items)
        disliked = _rows(disliked, users, items)
        in_matrix = (disliked >= 0).all(axis=1)
        user_feedback = UserFeedback(
            seen[(seen >= 0).all(axis=1)],
            disliked[in_matrix],
            feedback.disliked_weights[in_matrix],
            _rows(pairs, users, items),
            pair_weights,
        )
        user_rows, item_rows = _rows(liked, users, items).T
        # A snapshot is ordered by user, time and seq already.
        return Interactions.from_arrays(
            user_rows,
            item_rows,
            user_ids=[self.user_ids[user] for user in users.tolist()],
            item_ids=[self.item_ids[item] for item in items.tolist()],
            weights=feedback.liked_weights if np.ptp(feedback.liked_weights) > 0 else None,
            feedback=user_feedback if len(user_feedback) else None,
            times=snapshot.timestamp[mask][feedback.liked] / 1e6,
        )

    def known_at(
        self, interactions: Interactions, users: BoolArray, seq: int
    ) -> tuple[Interactions, Interactions]:
        """The part of some users' interactions that was known when all up to ``seq`` had come in.

        Args:
            interactions: All interactions.
            users: (n_users,) mask of the users.
            seq: The seq up to which the incumbent was trained.

        Returns:
            The interactions that had an event by then, whatever its type means, and those whose
            item the user had named by then in a stated preference, taken back later or not.
        """
        snapshot, preferences = self.snapshot, self.snapshot.preferences
        named = np.concatenate([preferences[:, [0, 1, 4]], preferences[:, [0, 2, 4]]])
        return (
            self._select(
                interactions, users, snapshot.user_id, snapshot.item_id, snapshot.seq, seq
            ),
            self._select(interactions, users, named[:, 0], named[:, 1], named[:, 2], seq),
        )

    def _select(
        self,
        interactions: Interactions,
        users: BoolArray,
        user_id: IntArray,
        item_id: IntArray,
        seqs: IntArray,
        seq: int,
    ) -> Interactions:
        """Those of the users' interactions that are among these pairs of internal ids."""
        n_items = interactions.n_items
        old = seqs <= seq
        user = _rows_by_name(user_id[old], self.user_ids, interactions.user_ids)
        item = _rows_by_name(item_id[old], self.item_ids, interactions.item_ids)
        known = (user >= 0) & (item >= 0)
        known &= users[user]  # −1 is any user, and left out already
        mask = users[interactions.users]
        keys = interactions.users[mask] * n_items + interactions.items[mask]
        selected = mask.copy()
        selected[mask] = np.isin(keys, user[known] * n_items + item[known])
        return interactions.select(selected)


def _resolve_feedback(events: IntArray, weights: FloatArray) -> FeedbackPositions:
    """What users like, dislike or have only seen, of (n, 2) users and items.

    Where all weights are the same, what is liked repeats as events do.
    """
    if weights[0] > 0 and (weights == weights[0]).all():
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


def _rows_by_name(ids: IntArray, names: dict[int, str], row_names: Sequence[str]) -> IntArray:
    """Matrix rows of internal ids by their clients' ids; −1 for those without a row."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    rows: IntArray = row_indices([names.get(i, "") for i in distinct.tolist()], row_names)[inverse]
    return rows
