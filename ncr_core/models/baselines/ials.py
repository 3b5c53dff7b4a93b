"""iALS: implicit alternating least squares, by the library ``implicit``.

Hu, Koren, Volinsky, "Collaborative Filtering for Implicit Feedback Datasets", ICDM 2008, with the
parameters of Rendle, Krichene, Zhang, Koren, "Revisiting the Performance of iALS on Item
Recommendation Benchmarks", 2021 (arXiv:2110.14037).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ncr_core.data.interactions import Interactions
from ncr_core.errors import DataError
from ncr_core.models.baselines.extras import require
from ncr_core.models.baselines.limits import above_zero, at_least
from ncr_core.models.baselines.scoring import FactorModel


@dataclass(frozen=True)
class IALSConfig:
    """Rendle's parameters, with what was best on the validation items of MovieLens 1M.

    The loss is Σ_S (1 − ŷ)² + alpha0 · Σ_all ŷ² + the L2 penalty, in which Rendle weighs the
    squared norm of user u by l2 · (|Iᵤ| + alpha0 · n_items)^nu, and that of item i by
    l2 · (|Uᵢ| + alpha0 · n_users)^nu. The library has one weight for all vectors, so here each
    count is replaced by its mean: ``l2`` and ``nu`` keep their size, but frequent users and items
    are not held back more than others. The more of the counts comes from alpha0, the less that
    changes. Raises ConfigError on what cannot be.
    """

    factors: int = 192
    alpha0: float = 0.6
    l2: float = 0.005
    nu: float = 1.0
    iterations: int = 10
    init_std: float = 0.1
    """The standard deviation of the first vectors, times √factors."""
    threads: int = 1
    """0 is one for each core."""
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "factors", "iterations")
        at_least(self, 0, "nu", "threads")
        above_zero(self, "alpha0", "l2", "init_std")


class IALS(FactorModel):
    """The factors after some iteration."""


OnIteration = Callable[[IALS, int], bool]


def fit_ials(
    train: Interactions, config: IALSConfig, on_iteration: OnIteration | None = None
) -> IALS:
    """The model after the last iteration.

    ``on_iteration`` is given the model of each iteration, counted from 1, to keep or to measure; it
    returns True to end the training there. Raises ConfigError when ``implicit`` is not installed
    and DataError when there are no interactions.
    """
    als = require("implicit.als", "research")
    sparse = require("scipy.sparse", "research")
    threads = require("threadpoolctl", "research")
    if train.nnz == 0:
        raise DataError("there are no interactions to learn from")
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
