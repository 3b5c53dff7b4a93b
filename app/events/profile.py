"""User profiles: a user's events and stated preferences, and the feedback they resolve to.

Feedback resolution: the latest event of a user about an item with a non-zero weight decides between
like and dislike. Of a user's preferences between two items, the latest counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from app.events.event_weights import EventWeights

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
NO_ATTRIBUTES = "{}"


@dataclass(frozen=True, slots=True, eq=False)
class FeedbackPositions:
    """The events that decide about each item, as ascending positions in an array of events."""

    liked: IntArray
    """The latest positive event of each liked item."""
    liked_weights: FloatArray
    """The highest weight among all events of each liked item."""
    disliked: IntArray
    """The latest negative event of each disliked item."""
    disliked_weights: FloatArray
    """The absolute weight of the latest negative event of each disliked item."""
    only_seen: IntArray
    """The latest event of each item that is neither liked nor disliked."""


def resolve_feedback(keys: IntArray, weights: FloatArray) -> FeedbackPositions:
    """Decide for each key whether its events mean like, dislike or seen.

    A repeated positive event adds nothing. The highest weight counts, so a hundred clicks do not
    become a purchase.

    Args:
        keys: (n,) the subject of each event (an item, or a user and an item), oldest event first.
        weights: (n,) the weight of each event.
    """
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_weights = keys[order], weights[order]
    is_start = np.ones(len(keys), dtype=np.bool_)
    is_start[1:] = sorted_keys[1:] != sorted_keys[:-1]
    starts = np.flatnonzero(is_start)
    if len(starts) == 0:
        no_events, no_weights = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return FeedbackPositions(no_events, no_weights, no_events, no_weights, no_events)
    positions = np.arange(len(keys))
    ends = np.append(starts[1:], len(keys)) - 1
    latest_positive = np.maximum.reduceat(np.where(sorted_weights > 0, positions, -1), starts)
    latest_negative = np.maximum.reduceat(np.where(sorted_weights < 0, positions, -1), starts)
    highest = np.maximum.reduceat(sorted_weights, starts)
    is_liked, is_disliked = latest_positive > latest_negative, latest_negative > latest_positive
    liked, disliked = order[latest_positive[is_liked]], order[latest_negative[is_disliked]]
    by_position = np.argsort(liked)
    disliked.sort()
    return FeedbackPositions(
        liked[by_position],
        highest[is_liked][by_position],
        disliked,
        -weights[disliked],
        np.sort(order[ends[~(is_liked | is_disliked)]]),
    )


def latest_preferences(preferences: IntArray) -> IntArray:
    """Return the ascending positions of the preferences that no later one replaces.

    Args:
        preferences: (P, k) oldest first. The last two columns are the winner and the loser. A row
            replaces earlier rows about the same two items, in either order, with the same other
            columns.
    """
    if len(preferences) < 2:
        return np.arange(len(preferences))
    unordered = np.concatenate([preferences[:, :-2], np.sort(preferences[:, -2:], axis=1)], axis=1)
    _, from_end = np.unique(unordered[::-1], axis=0, return_index=True)
    return np.sort(len(preferences) - 1 - from_end)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedFeedback:
    """A user's likes, dislikes and preferences, oldest first. Item ids are internal."""

    positives: IntArray
    positive_weights: FloatArray
    disliked: IntArray
    disliked_weights: FloatArray
    pairs: IntArray
    pair_seqs: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A user's events and preferences at one moment. Ids are internal."""

    user_id: int | None
    """None: the user is unknown."""
    last_seq: int
    """The seq of the user's last change; 0 for an unknown user."""
    seen: IntArray
    """(n,) the items of the user's events, in the order of their seq, with repetitions."""
    seqs: IntArray
    """(n,) the seq of each event."""
    weights: FloatArray
    """(n,) the weight of each event, see `EventWeights`; not decayed."""
    timestamps: IntArray
    """(n,) the time of each event, in microseconds since 1970."""
    preferences: IntArray
    """(P, 4) stated preferences in the order of their seq: winner, loser, seq, timestamp."""
    event_seq: int
    """The highest seq of the service. The profile includes all changes up to this seq."""
    catalog_seq: int
    """The catalogue's number, for `CatalogService.catalogue`."""
    event_weights: EventWeights
    """The rules of the weights and of their decay."""
    attributes: str = NO_ATTRIBUTES
    """The user's attributes, as JSON."""
    attributes_seq: int = 0
    """The number of the last change of the attributes; 0 if unknown."""
    _resolved: list[ResolvedFeedback] = field(default_factory=list, repr=False)
    """The resolved feedback, empty until the first use. Profiles by `at` share the list."""

    def at(self, event_seq: int, catalog_seq: int) -> Profile:
        """Return the profile at a later moment, up to which the user has not changed."""
        # Spelled out: `dataclasses.replace` takes twice as long, and every request comes here.
        return Profile(
            self.user_id,
            self.last_seq,
            self.seen,
            self.seqs,
            self.weights,
            self.timestamps,
            self.preferences,
            max(self.event_seq, event_seq),
            max(self.catalog_seq, catalog_seq),
            self.event_weights,
            self.attributes,
            self.attributes_seq,
            self._resolved,
        )

    def until(self, seq: int) -> Profile:
        """Return the profile without events and preferences after a seq of the user.

        Events and preferences that were deleted since then are missing. The attributes are the
        current ones.
        """
        if seq >= self.last_seq:
            return self
        earlier, stated = self.seqs <= seq, self.preferences[:, 2] <= seq
        return replace(
            self,
            last_seq=seq,
            seen=self.seen[earlier],
            seqs=self.seqs[earlier],
            weights=self.weights[earlier],
            timestamps=self.timestamps[earlier],
            preferences=self.preferences[stated],
            _resolved=[],
        )

    @property
    def is_newcomer(self) -> bool:
        """Whether the user has neither events nor stated preferences."""
        return len(self.seen) == 0 and len(self.preferences) == 0

    @property
    def is_described(self) -> bool:
        """Whether the user has attributes."""
        return self.attributes != NO_ATTRIBUTES

    @property
    def first_seq(self) -> int:
        """The seq of the first event or preference that was not deleted; 0 for a newcomer."""
        return min((int(seqs[0]) for seqs in self._all_seqs), default=0)

    @property
    def latest_seq(self) -> int:
        """The seq of the last event or preference that was not deleted; 0 for a newcomer."""
        return max((int(seqs[-1]) for seqs in self._all_seqs), default=0)

    @property
    def positives(self) -> IntArray:
        """The liked items, each once, by the time of their latest positive event."""
        return self._feedback.positives

    @property
    def positive_weights(self) -> FloatArray:
        """The highest weight of each of ``positives``, decayed to the user's latest event."""
        return self._feedback.positive_weights

    @property
    def disliked(self) -> IntArray:
        """The disliked items, each once. Lists leave these items out."""
        return self._feedback.disliked

    @property
    def disliked_weights(self) -> FloatArray:
        """The absolute weight of each of ``disliked``, decayed to the user's latest event."""
        return self._feedback.disliked_weights

    @property
    def pairs(self) -> IntArray:
        """(P, 2) winner and loser of each preference that no later one replaces, oldest first."""
        return self._feedback.pairs

    @property
    def pair_seqs(self) -> IntArray:
        """(P,) the seq of each of ``pairs``."""
        return self._feedback.pair_seqs

    @property
    def nbytes(self) -> int:
        """The memory of the arrays and of the resolved feedback, in bytes."""
        arrays = (self.seen, self.seqs, self.weights, self.timestamps, self.preferences)
        resolved = 12 * len(self.seen) + 24 * len(self.preferences)
        return sum(array.nbytes for array in arrays) + resolved + len(self.attributes)

    @property
    def _all_seqs(self) -> list[IntArray]:
        return [seqs for seqs in (self.seqs, self.preferences[:, 2]) if len(seqs)]

    @property
    def _feedback(self) -> ResolvedFeedback:
        if not self._resolved:
            self._resolved.append(self._resolve())
        return self._resolved[0]

    def _resolve(self) -> ResolvedFeedback:
        by_time = np.argsort(self.timestamps, kind="stable")
        items, weights, times = self.seen[by_time], self.weights[by_time], self.timestamps[by_time]
        if self.event_weights.half_life_days is not None and len(times):
            weights = weights * self.event_weights.decay(times, int(times[-1]))
        feedback = resolve_feedback(items, weights)
        pairs = self.preferences
        pairs = pairs[np.lexsort((pairs[:, 2], pairs[:, 3]))]
        pairs = pairs[latest_preferences(pairs[:, :2])]
        return ResolvedFeedback(
            items[feedback.liked],
            feedback.liked_weights,
            items[feedback.disliked],
            feedback.disliked_weights,
            pairs[:, :2],
            pairs[:, 2],
        )
