"""What is known of a user, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.events.feedback import Feedback
from app.events.verdicts import IntArray, standing, verdicts


@dataclass(frozen=True, slots=True, eq=False)
class Taste:
    """What a user's events and statements come to. Ids are internal; all are oldest first."""

    positives: IntArray
    positive_weights: NDArray[np.float32]
    disliked: IntArray
    disliked_weights: NDArray[np.float32]
    pairs: IntArray
    pair_seqs: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What is known of a user at one moment. Ids are internal."""

    user_id: int | None
    """None: no event of this user was ever seen."""
    last_seq: int
    """The seq of the user's last change, 0 for an unknown user."""
    seen: IntArray
    """The items of the user's events, in the order of their seq; repeated where they repeat."""
    seqs: IntArray
    """The seq of each of them."""
    weights: NDArray[np.float32]
    """What each says, see `Feedback`: above 0 positive, 0 only seen, below 0 not wanted."""
    timestamps: IntArray
    """When each was, in microseconds since 1970."""
    preferences: IntArray
    """(P, 4) the stated ones in the order of their seq: winner, loser, seq, timestamp."""
    event_seq: int
    """The highest seq of the whole service: this profile has taken in everything up to it."""
    catalog_seq: int
    """The catalogue's number, for `CatalogService.catalogue`."""
    feedback: Feedback
    """What the weights are by, and how they decay."""
    _worked_out: list[Taste] = field(default_factory=list, repr=False)
    """At most one; what was worked out at one moment is there at the later ones."""

    def at(self, event_seq: int, catalog_seq: int) -> Profile:
        """The same at a later moment, when nothing has happened to the user."""
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
            self.feedback,
            self._worked_out,
        )

    @property
    def is_newcomer(self) -> bool:
        """Whether the user has neither events nor stated preferences."""
        return len(self.seen) == 0 and len(self.preferences) == 0

    @property
    def first_seq(self) -> int:
        """The seq of the first event or preference that is left; 0 for a newcomer."""
        return min((int(seqs[0]) for seqs in self._all_seqs), default=0)

    @property
    def latest_seq(self) -> int:
        """The seq of the last event or preference that is left; 0 for a newcomer."""
        return max((int(seqs[-1]) for seqs in self._all_seqs), default=0)

    @property
    def positives(self) -> IntArray:
        """The items whose last word is positive, each once, by the time of its latest positive
        event, oldest first."""
        return self._taste.positives

    @property
    def positive_weights(self) -> NDArray[np.float32]:
        """The weight of each of ``positives``: the highest of its events, by their age beside the
        user's latest event."""
        return self._taste.positive_weights

    @property
    def disliked(self) -> IntArray:
        """The items whose last word is negative, each once: never to be recommended."""
        return self._taste.disliked

    @property
    def disliked_weights(self) -> NDArray[np.float32]:
        """How much each of ``disliked`` is not wanted, above 0."""
        return self._taste.disliked_weights

    @property
    def pairs(self) -> IntArray:
        """(P, 2) winners and losers that the user stated, oldest first; of two statements about the
        same two items the latest."""
        return self._taste.pairs

    @property
    def pair_seqs(self) -> IntArray:
        """The seq of each of ``pairs``."""
        return self._taste.pair_seqs

    @property
    def nbytes(self) -> int:
        """The memory of its arrays, with what is worked out of them."""
        own = (self.seen, self.seqs, self.weights, self.timestamps, self.preferences)
        return sum(part.nbytes for part in own) + 12 * len(self.seen) + 24 * len(self.preferences)

    @property
    def _all_seqs(self) -> list[IntArray]:
        return [seqs for seqs in (self.seqs, self.preferences[:, 2]) if len(seqs)]

    @property
    def _taste(self) -> Taste:
        if not self._worked_out:
            self._worked_out.append(self._work_out())
        return self._worked_out[0]

    def _work_out(self) -> Taste:
        by_time = np.argsort(self.timestamps, kind="stable")
        items, weights, times = self.seen[by_time], self.weights[by_time], self.timestamps[by_time]
        if self.feedback.half_life_days is not None and len(times):
            weights = weights * self.feedback.decay(times, int(times[-1]))
        found = verdicts(items, weights)
        stated = self.preferences
        stated = stated[np.lexsort((stated[:, 2], stated[:, 3]))]
        stated = stated[standing(stated[:, :2])]
        return Taste(
            items[found.liked],
            found.liked_weights,
            items[found.disliked],
            found.disliked_weights,
            stated[:, :2],
            stated[:, 2],
        )
