"""What is known of users beyond their positives: what they only saw, dislike, or rather have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def _rows(width: int) -> IntArray:
    return np.zeros((0, width), dtype=np.int64)


def _none() -> FloatArray:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class Stated:
    """Rows of the users and columns of the items of the Interactions that it belongs to.

    None of a user's ``seen`` and ``disliked`` items is among the user's positives.
    """

    seen: IntArray = field(default_factory=lambda: _rows(2))
    """(S, 2) user and item: never drawn as a negative, and no positive either."""
    disliked: IntArray = field(default_factory=lambda: _rows(2))
    """(D, 2) user and item: a loser against every positive of the user."""
    disliked_weights: FloatArray = field(default_factory=_none)
    """(D,) how much each counts, above 0."""
    pairs: IntArray = field(default_factory=lambda: _rows(3))
    """(P, 3) user, winner and loser: learned as they are."""
    pair_weights: FloatArray = field(default_factory=_none)
    """(P,) how much each counts, above 0."""

    def __len__(self) -> int:
        return len(self.seen) + len(self.disliked) + len(self.pairs)

    def renumbered(self, to_user: IntArray, to_item: IntArray) -> Stated:
        """On other rows and columns: the new number of each old one, −1 for those that leave."""
        seen, disliked = (
            np.stack([to_user[part[:, 0]], to_item[part[:, 1]]], axis=1)
            for part in (self.seen, self.disliked)
        )
        user, winner, loser = self.pairs.T
        pairs = np.stack([to_user[user], to_item[winner], to_item[loser]], axis=1)
        seen_stays, disliked_stays, pairs_stay = (
            (part >= 0).all(axis=1) for part in (seen, disliked, pairs)
        )
        return Stated(
            seen[seen_stays],
            disliked[disliked_stays],
            self.disliked_weights[disliked_stays],
            pairs[pairs_stay],
            self.pair_weights[pairs_stay],
        )

    def without_pairs_of(self, held_out: IntArray) -> Stated:
        """Without what users said about the item that is held out of theirs.

        ``held_out`` (n_users,) is −1 for users of whom none is.
        """
        own = held_out[self.pairs[:, 0]]
        stays: BoolArray = (self.pairs[:, 1] != own) & (self.pairs[:, 2] != own)
        if stays.all():
            return self
        return Stated(
            self.seen,
            self.disliked,
            self.disliked_weights,
            self.pairs[stays],
            self.pair_weights[stays],
        )
