"""ItemPop: every user gets the most popular items."""

from __future__ import annotations

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.models.baselines.scoring import ScoreModel, Scores


class Popularity(ScoreModel):
    """Ranks items by the number of their interactions in training, ties in the order given."""

    def __init__(self, train: Interactions) -> None:
        self.counts = train.item_counts()

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items): the counts, in every row."""
        return np.broadcast_to(self.counts.astype(np.float64), (len(users), len(self.counts)))
