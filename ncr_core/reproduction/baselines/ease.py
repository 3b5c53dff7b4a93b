"""EASE: a linear item-item model with a closed form.

Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import ConfigError
from ncr_core.reproduction.baselines.scoring import ScoreModel, Scores

MAX_ITEMS = 20_000  # at its peak the inverse takes three float64 matrices: 10 GB for so many items
_ROWS = 1024


class EASE(ScoreModel):
    """Scores an item by the sum of its weights from the user's items.

    ``weights`` is (n_items, n_items), from the row's item to the column's, with a zero diagonal.
    With ``half_life`` h the item that is n places older than the user's latest counts 2^(−n/h): no
    part of EASE, but the least that a method without an idea of time needs beside one that has it.
    """

    def __init__(
        self,
        train: Interactions,
        weights: npt.NDArray[np.float32],
        half_life: float | None = None,
    ) -> None:
        self.train = train
        self.weights = weights
        self.half_life = half_life

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items); all zero for a user without items."""
        scores = np.empty((len(users), self.train.n_items), dtype=np.float32)
        for row, user in enumerate(users):
            items = self.train.items_of(user)
            if self.half_life is None:
                self.weights[items].sum(axis=0, out=scores[row])
            else:
                age = np.arange(len(items) - 1, -1, -1)
                scores[row] = (
                    np.exp2(-age / self.half_life).astype(np.float32) @ self.weights[items]
                )
        return scores


def fit_ease(train: Interactions, l2: float, half_life: float | None = None) -> EASE:
    """The model for the weight ``l2`` (λ) of the L2 penalty; ``half_life`` as of ``EASE``.

    Raises ConfigError when either is not above zero, and when there are more than ``MAX_ITEMS``
    items: the matrix of all pairs of items has to fit into memory.
    """
    if not l2 > 0:
        raise ConfigError(f"l2 must be above 0, not {l2}")
    if half_life is not None and not half_life > 0:
        raise ConfigError(f"half_life must be above 0, not {half_life}")
    if train.n_items > MAX_ITEMS:
        gigabytes = 3 * 8 * train.n_items**2 / 1e9
        raise ConfigError(
            f"EASE takes at most {MAX_ITEMS:,} items: for {train.n_items:,} its matrices of all "
            f"pairs of items would need about {gigabytes:,.0f} GB"
        )
    gram = _co_occurrences(train)
    gram[np.diag_indices_from(gram)] += l2
    inverse = np.linalg.inv(gram)
    inverse /= -np.diag(inverse).copy()
    np.fill_diagonal(inverse, 0.0)
    return EASE(train, inverse.astype(np.float32), half_life)


def _co_occurrences(train: Interactions) -> npt.NDArray[np.float64]:
    """(n_items, n_items) how many users have both items, by blocks of users."""
    gram = np.zeros((train.n_items, train.n_items))
    for start in range(0, train.n_users, _ROWS):
        stop = min(start + _ROWS, train.n_users)
        entries = slice(train.indptr[start], train.indptr[stop])
        # Sums of at most so many ones are exact in float32.
        rows = np.zeros((stop - start, train.n_items), dtype=np.float32)
        rows[train.users[entries] - start, train.items[entries]] = 1.0
        gram += rows.T @ rows
    return gram
