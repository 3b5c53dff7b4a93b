"""eALS: matrix factorisation by element-wise alternating least squares.

He, Zhang, Kan, Chua, "Fast Matrix Factorization for Online Recommendation with Implicit Feedback",
SIGIR 2016, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import DataError
from ncr_core.models.baselines.limits import above_zero, at_least
from ncr_core.models.baselines.scoring import FactorModel

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EALSConfig:
    """What the loss weighs and how long it is minimised; raises ConfigError on what cannot be.

    Every interaction has weight 1 and target 1. The target of everything else is 0, with weight
    cᵢ = c0 · fᵢ^alpha / Σⱼ fⱼ^alpha for the item's share fᵢ of the interactions.
    """

    factors: int = 8
    c0: float = 512.0
    """The weights of missing data, summed over the items."""
    alpha: float = 0.5
    """How much more a popular item's absence says: 0 is not at all."""
    l2: float = 0.01
    """λ, the weight of the squared norms of all vectors (the paper's; on MovieLens 1M 10 is
    better)."""
    iterations: int = 50
    init_std: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "factors", "iterations")
        at_least(self, 0, "c0", "alpha")
        above_zero(self, "l2", "init_std")


class EALS(FactorModel):
    """The factors after some iteration."""


OnIteration = Callable[[EALS, int], bool]


def fit_eals(
    train: Interactions, config: EALSConfig, on_iteration: OnIteration | None = None
) -> EALS:
    """The model after the last iteration.

    ``on_iteration`` is given the model of each iteration, counted from 1, to keep or to measure; it
    returns True to end the training there. Raises DataError when there are no interactions.
    """
    if train.nnz == 0:
        raise DataError("there are no interactions to learn from")
    rng = np.random.default_rng(config.seed)
    # One row a factor: an update goes through the whole of one factor.
    p = rng.normal(0.0, config.init_std, (train.n_users, config.factors)).T.copy()
    q = rng.normal(0.0, config.init_std, (train.n_items, config.factors)).T.copy()
    missing = missing_weights(train, config)
    by_item = np.argsort(train.items, kind="stable")
    users = _Side.of(train.users, train.items, missing[train.items])
    items = _Side.of(train.items[by_item], train.users[by_item], missing[train.items[by_item]])
    model = EALS(p.T.copy(), q.T.copy())
    for iteration in range(1, config.iterations + 1):
        # missing data costs a user Σᵢ cᵢ (p·qᵢ)² and an item cᵢ Σᵤ (pᵤ·q)²
        users.update(p, q, np.ones(train.n_users), (q * missing) @ q.T, config.l2)
        items.update(q, p, missing, p @ p.T, config.l2)
        model = EALS(p.T.copy(), q.T.copy())
        if on_iteration is not None and on_iteration(model, iteration):
            break
    return model


def missing_weights(train: Interactions, config: EALSConfig) -> FloatArray:
    """(n_items,) the weights cᵢ of missing data; 0 for items without interactions."""
    counts = train.item_counts()
    shares = np.where(counts > 0, (counts / train.nnz) ** config.alpha, 0.0)
    weights: FloatArray = config.c0 * shares / shares.sum()
    return weights


@dataclass(frozen=True)
class _Side:
    """The interactions in the order of the rows that are updated, users or items.

    All rows are updated together, one factor after the other: a row's update needs nothing of the
    other rows, so this is the order of Algorithm 1 for each.
    """

    rows: IntArray
    """The rows that have interactions; the others only shrink towards zero."""
    starts: IntArray
    lengths: IntArray
    others: IntArray
    """(nnz,) the other side's row of each interaction."""
    extra: FloatArray
    """(nnz,) 1 − cᵢ: how much more an interaction weighs than its absence would."""

    @classmethod
    def of(cls, sorted_rows: IntArray, others: IntArray, missing: FloatArray) -> _Side:
        rows, starts, lengths = np.unique(sorted_rows, return_index=True, return_counts=True)
        return cls(rows, starts, lengths, others, 1.0 - missing)

    def update(
        self, own: FloatArray, other: FloatArray, scale: FloatArray, cache: FloatArray, l2: float
    ) -> None:
        """Updates ``own`` (d, rows) in place, given ``other`` (d, columns) and its cache (d, d).

        A row's missing data is weighed by ``scale`` (rows,) times the cache. The paper's closed
        form of an element is written as its old value plus the gradient over the curvature.
        """
        predicted = np.zeros(len(self.others))
        for mine, theirs in zip(own, other, strict=True):
            predicted += np.repeat(mine[self.rows], self.lengths) * theirs[self.others]
        for f, mine in enumerate(own):
            theirs = other[f][self.others]
            gradient = -scale * (cache[f] @ own) - l2 * mine
            gradient[self.rows] += self._sums((1.0 - self.extra * predicted) * theirs)
            curvature = scale * cache[f, f] + l2
            curvature[self.rows] += self._sums(self.extra * theirs * theirs)
            step = gradient / curvature
            mine += step
            predicted += np.repeat(step[self.rows], self.lengths) * theirs

    def _sums(self, values: FloatArray) -> FloatArray:
        """(nnz,) values → their sums over each of ``rows``."""
        sums: FloatArray = np.add.reduceat(values, self.starts)
        return sums
