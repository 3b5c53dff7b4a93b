"""ItemPop: every user gets the most popular items."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions


class Popularity:
    """Ranks items by the number of their interactions in training, ties in the order given."""

    def __init__(self, train: Interactions) -> None:
        self.counts = train.item_counts()

    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """(B,) users and (B, M) candidates, −1 for padding → (B, min(k, M)) items, −1 padded."""
        scores = np.where(candidates >= 0, self.counts[candidates], -1)
        order: npt.NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(candidates, order, axis=1)
