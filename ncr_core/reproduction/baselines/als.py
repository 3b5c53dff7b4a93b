"""Alternating least squares: iALS by the library ``implicit``, and element-wise eALS.

iALS: Hu, Koren, Volinsky, "Collaborative Filtering for Implicit Feedback Datasets", ICDM 2008, with
the parameters of Rendle, Krichene, Zhang, Koren, "Revisiting the Performance of iALS on Item
Recommendation Benchmarks", 2021 (arXiv:2110.14037).

eALS: He, Zhang, Kan, Chua, "Fast Matrix Factorization for Online Recommendation with Implicit
Feedback", SIGIR 2016, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import DataError
from ncr_core.optional_imports import require
from ncr_core.parameters import check_parameters, parameter
from ncr_core.reproduction.baselines.scoring import FactorModel

OnIteration = Callable[[FactorModel, int], bool]
"""Called with the model and the number of each iteration, from 1; True ends the training there."""


@dataclass(frozen=True)
class IALSConfig:
    """Rendle's parameters, with what was best on the validation items of MovieLens 1M.

    The loss is Σ_S (1 − ŷ)² + alpha0 · Σ_all ŷ² + the L2 penalty, in which Rendle weighs the
    squared norm of user u by l2 · (|Iᵤ| + alpha0 · n_items)^nu, and that of item i by l2 · (|Uᵢ| +
    alpha0 · n_users)^nu. The library has one weight for all vectors, so here each count is replaced
    by its mean: ``l2`` and ``nu`` keep their size, but frequent users and items are not held back
    more than others. The more of the counts comes from alpha0, the less that changes. Raises
    ConfigError if a value is out of bounds.
    """

    factors: int = parameter(192, ge=1)

    alpha0: float = parameter(0.6, gt=0)

    l2: float = parameter(0.005, gt=0)

    nu: float = parameter(1.0, ge=0)

    iterations: int = parameter(10, ge=1)

    init_std: float = parameter(0.1, gt=0)
    """The standard deviation of the first vectors, times √factors."""

    threads: int = parameter(1, ge=0)
    """0 is one for each core."""

    seed: int = parameter(0)

    def __post_init__(self) -> None:
        check_parameters(self)


class IALS(FactorModel):
    """The factors after some iteration."""


def fit_ials(
    train: Interactions, config: IALSConfig, on_iteration: OnIteration | None = None
) -> IALS:
    """The model after the last iteration, see `OnIteration`. Raises DataError without any data."""
    als = require("implicit.als", "research")
    sparse = require("scipy.sparse", "research")
    threads = require("threadpoolctl", "research")
    if train.nnz == 0:
        raise DataError("the data has no interactions to learn from")
    confidence, penalty = library_terms(train, config)
    values = np.full(train.nnz, confidence, dtype=np.float32)
    matrix = sparse.csr_matrix(
        (values, train.items, train.indptr), shape=(train.n_users, train.n_items)
    )
    matrix.sort_indices()
    # The library's threads are over rows; those of BLAS within a row would only be in their way.
    with threads.threadpool_limits(1, "blas"):
        solver = als.AlternatingLeastSquares(
            factors=config.factors,
            regularization=penalty,
            iterations=1,
            num_threads=config.threads,
            use_gpu=False,
        )
        rng = np.random.default_rng(config.seed)
        std = config.init_std / math.sqrt(config.factors)
        for name, rows in (("user_factors", train.n_users), ("item_factors", train.n_items)):
            start = rng.normal(0.0, std, (rows, config.factors)).astype(np.float32)
            setattr(solver, name, start)
        for iteration in range(1, config.iterations + 1):
            solver.fit(matrix, show_progress=False)
            model = IALS(solver.user_factors.copy(), solver.item_factors.copy())
            if on_iteration is not None and on_iteration(model, iteration):
                break
    return model


def library_terms(train: Interactions, config: IALSConfig) -> tuple[float, float]:
    """The library's confidence of an interaction and weight of the L2 penalty.

    The library minimises Σ_S c (1 − ŷ)² + Σ_rest ŷ² + penalty. With c = 1 + 1/alpha0 that is
    Rendle's loss over alpha0, but for the target, 1 + alpha0 in place of 1: the vectors grow by
    √(1 + alpha0), which the penalty has to allow for. What is on the users' vectors weighs as much
    as on the items', since the product is all that the loss sees: so the mean is geometric.
    """
    a0 = config.alpha0
    of_user = (train.nnz / train.n_users + a0 * train.n_items) ** config.nu
    of_item = (train.nnz / train.n_items + a0 * train.n_users) ** config.nu
    penalty = config.l2 * math.sqrt(of_user * of_item) * (1.0 + a0) / a0
    return 1.0 + 1.0 / a0, penalty


FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EALSConfig:
    """What the loss weighs and how long it is minimised.

    Every interaction has weight 1 and target 1. The target of everything else is 0, with weight cᵢ
    = c0 · fᵢ^alpha / Σⱼ fⱼ^alpha for the item's share fᵢ of the interactions. Raises ConfigError if
    a value is out of bounds.
    """

    factors: int = parameter(8, ge=1)

    c0: float = parameter(512.0, ge=0)
    """The weights of missing data, summed over the items."""

    alpha: float = parameter(0.5, ge=0)
    """How much more a popular item's absence says: 0 is not at all."""

    l2: float = parameter(0.01, gt=0)
    """λ, the weight of the squared norms of all vectors (the paper's; on MovieLens 1M 10 is
    better)."""

    iterations: int = parameter(50, ge=1)

    init_std: float = parameter(0.01, gt=0)

    seed: int = parameter(0)

    def __post_init__(self) -> None:
        check_parameters(self)


class EALS(FactorModel):
    """The factors after some iteration."""


def fit_eals(
    train: Interactions, config: EALSConfig, on_iteration: OnIteration | None = None
) -> EALS:
    """The model after the last iteration, see `OnIteration`. Raises DataError without any data."""
    if train.nnz == 0:
        raise DataError("the data has no interactions to learn from")
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
        for row_factor, column_factor in zip(own, other, strict=True):
            predicted += np.repeat(row_factor[self.rows], self.lengths) * column_factor[self.others]
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
