"""BPR-MF by the library ``cornac``: a public implementation to compare with.

Rendle, Freudenthaler, Gantner, Schmidt-Thieme, "BPR: Bayesian Personalized Ranking from Implicit
Feedback", UAI 2009, with item biases.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ncr_core.data.interactions import Interactions
from ncr_core.errors import DataError
from ncr_core.optional_imports import require
from ncr_core.reproduction.baselines.scoring import FactorModel, Scores


class CornacBPR(FactorModel):
    """Scores by factors with the item's bias as one more; ``seconds`` of training alone."""

    def __init__(self, user_factors: Scores, item_factors: Scores, seconds: float) -> None:
        super().__init__(user_factors, item_factors)
        self.seconds = seconds


def fit_cornac_bpr(
    train: Interactions,
    factors: int,
    *,
    learning_rate: float = 0.05,
    regularisation: float = 0.005,
    iterations: int = 100,
    threads: int = 0,
    seed: int | None = None,
) -> CornacBPR:
    """The model after ``iterations`` passes over as many drawn pairs as there are interactions.

    ``threads`` 0 is one for each core. With a ``seed`` the library takes one thread whatever
    ``threads`` says, and gives the same model each time. Raises ConfigError when ``cornac`` is not
    installed and DataError when there are no interactions.
    """
    bpr = require("cornac.models", "cornac").BPR(
        k=factors,
        max_iter=iterations,
        learning_rate=learning_rate,
        lambda_reg=regularisation,
        num_threads=threads,
        seed=seed,
    )
    data = _dataset(train)
    started = time.perf_counter()
    bpr.fit(data)
    seconds = time.perf_counter() - started
    ones = np.ones((train.n_users, 1), dtype=np.float32)
    return CornacBPR(
        np.hstack([bpr.u_factors, ones]),
        np.hstack([bpr.i_factors, bpr.i_biases[:, None]]),
        seconds,
    )


def _dataset(train: Interactions) -> Any:
    """The interactions as the library has them, with the same numbers for users and items."""
    if train.nnz == 0:
        raise DataError("there are no interactions to learn from")
    # Its Dataset.build would number users and items anew, and leave out those without any.
    return require("cornac.data", "cornac").Dataset(
        num_users=train.n_users,
        num_items=train.n_items,
        uid_map={user: user for user in range(train.n_users)},
        iid_map={item: item for item in range(train.n_items)},
        uir_tuple=(train.users, train.items, np.ones(train.nnz)),
    )
