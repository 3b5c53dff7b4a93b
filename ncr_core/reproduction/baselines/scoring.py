"""Baselines that rank by a score of each (user, item); the popularity of the item is one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import ConfigError, TrainingError

Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class ScoreModel(ABC):
    """A method with a score for each user and item: the higher, the better."""

    @abstractmethod
    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items) finite scores.

        A user's row is the same whoever else is asked for.
        """

    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """(B,) users and (B, M) candidates, −1 for padding → (B, min(k, M)) items, −1 padded.

        Best first, ties in the candidates' order. Raises TrainingError when a candidate's score is
        not a finite number: it has no place in an order.
        """
        padding = candidates < 0
        rows = np.arange(len(users))[:, None]
        scores = np.where(padding, 0.0, self.scores(users)[rows, candidates])
        if not np.isfinite(scores).all():
            raise TrainingError(f"{type(self).__name__} gives scores that are not finite numbers")
        order = np.argsort(np.where(padding, np.inf, -scores), axis=1, kind="stable")[:, :k]
        return np.take_along_axis(candidates, order, axis=1)


class FactorModel(ScoreModel):
    """Scores by the product of a user's vector and an item's.

    ``user_factors`` is (n_users, d) and ``item_factors`` (n_items, d). Raises ConfigError when the
    two do not fit each other.
    """

    def __init__(self, user_factors: Scores, item_factors: Scores) -> None:
        if user_factors.ndim != 2 or user_factors.shape[1:] != item_factors.shape[1:]:
            raise ConfigError(
                f"user factors of shape {user_factors.shape} do not fit item factors of shape "
                f"{item_factors.shape}"
            )
        self.user_factors = user_factors
        self.item_factors = item_factors

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items)."""
        scores = np.empty((len(users), len(self.item_factors)), dtype=self.item_factors.dtype)
        # One product a user: products of different batch shapes round differently.
        for row, user in enumerate(users):
            scores[row] = self.item_factors @ self.user_factors[user]
        return scores


class Popularity(ScoreModel):
    """Ranks items by the number of their interactions in training, ties in the order given."""

    def __init__(self, train: Interactions) -> None:
        self.counts = train.item_counts()

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items): the counts, in every row."""
        return np.broadcast_to(self.counts.astype(np.float64), (len(users), len(self.counts)))
