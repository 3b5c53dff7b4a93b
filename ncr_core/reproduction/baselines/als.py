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
"""A function of the model and the number of each iteration, from 1; True ends the training."""


@dataclass(frozen=True)
class IALSConfig:
    """Rendle's parameters, with defaults from the validation items of MovieLens 1M.

    The loss is Σ_S (1 − ŷ)² + alpha0 · Σ_all ŷ² + the L2 penalty. In Rendle's penalty the squared
    norm of user u has the weight l2 · (|Iᵤ| + alpha0 · n_items)^nu. The squared norm of item i has
    the weight l2 · (|Uᵢ| + alpha0 · n_users)^nu.

    The library has one weight for all vectors, so the mean replaces each count. ``l2`` and ``nu``
    keep their size, but the weight does not grow with a user's or an item's own count. The larger
    the share of alpha0 in the counts, the smaller the difference. Raises ConfigError if a value is
    out of bounds.
    """

    factors: int = parameter(192, ge=1)

    alpha0: float = parameter(0.6, gt=0)

    l2: float = parameter(0.005, gt=0)

    nu: float = parameter(1.0, ge=0)

    iterations: int = parameter(10, ge=1)

    init_std: float = parameter(0.1, gt=0)
    """The standard deviation of the first vectors, times √factors."""

    threads: int = parameter(1, ge=0)
    """The number of threads; 0 is one for each core."""

    seed: int = parameter(0)

    def __post_init__(self) -> None:
        check_parameters(self)


class IALS(FactorModel):
    """The factors of iALS after an iteration."""


def fit_ials(
    train: Interactions, config: IALSConfig, on_iteration: OnIteration | None = None
) -> IALS:
    """Fits iALS and returns the model after the last iteration, see `OnIteration`.

    Raises DataError if there are no interactions, and ConfigError if a library is not installed.
    """
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

    The library minimises Σ_S c (1 − ŷ)² + Σ_rest ŷ² + penalty. With c = 1 + 1/alpha0 this is
    Rendle's loss divided by alpha0, except that the target is 1 + alpha0 times as large. The
    vectors are therefore √(1 + alpha0) times as large, and the weight of the penalty allows for
    this factor. The loss depends only on products of users' and items' vectors. The geometric mean
    of the users' and the items' weight therefore gives the one weight.
    """
    a0 = config.alpha0
    of_user = (train.nnz / train.n_users + a0 * train.n_items) ** config.nu
    of_item = (train.nnz / train.n_items + a0 * train.n_users) ** config.nu
    penalty = config.l2 * math.sqrt(of_user * of_item) * (1.0 + a0) / a0
    return 1.0 + 1.0 / a0, penalty


FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EALSConfig:
    """The weights of the loss and the length of its minimisation.

    Every interaction has weight 1 and target 1. Every other pair has target 0 and weight cᵢ = c0 ·
    fᵢ^alpha / Σⱼ fⱼ^alpha, where fᵢ is the item's share of the interactions. Raises ConfigError if
    a value is out of bounds.
    """

    factors: int = parameter(8, ge=1)

    c0: float = parameter(512.0, ge=0)
    """The sum of the weights of missing data over the items."""

    alpha: float = parameter(0.5, ge=0)
    """The exponent that gives popular items' missing data more weight; 0 gives equal weights."""

    l2: float = parameter(0.01, gt=0)
    """λ, the weight of all squared norms, as in the paper; 10 is better on MovieLens 1M."""

    iterations: int = parameter(50, ge=1)

    init_std: float = parameter(0.01, gt=0)

    seed: int = parameter(0)

    def __post_init__(self) -> None:
        check_parameters(self)


class EALS(FactorModel):
    """The factors of eALS after an iteration."""


def fit_eals(
    train: Interactions, config: EALSConfig, on_iteration: OnIteration | None = None
) -> EALS:
    """Fits eALS and returns the model after the last iteration, see `OnIteration`.

    Raises DataError if there are no interactions.
    """
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
    """The interactions in the order of the rows to update, users or items.

    An update changes all rows together, one factor after the other. The rows do not depend on each
    other, so each row has the order of eALS's Algorithm 1.
    """

    rows: IntArray
    """The rows that have interactions; the others only shrink towards zero."""
    starts: IntArray
    lengths: IntArray
    others: IntArray
    """(nnz,) the other side's row of each interaction."""
    extra: FloatArray
    """(nnz,) 1 − cᵢ, the weight of an interaction above the weight of its absence."""

    @classmethod
    def of(cls, sorted_rows: IntArray, others: IntArray, missing: FloatArray) -> _Side:
        rows, starts, lengths = np.unique(sorted_rows, return_index=True, return_counts=True)
        return cls(rows, starts, lengths, others, 1.0 - missing)

    def update(
        self, own: FloatArray, other: FloatArray, scale: FloatArray, cache: FloatArray, l2: float
    ) -> None:
        """Updates ``own`` (d, rows) in place, given ``other`` (d, columns) and its cache (d, d).

        ``scale`` (rows,) times the cache gives the weight of a row's missing data. The paper has a
        closed form for an element. Here it is the old value plus the gradient divided by the
        curvature.
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
