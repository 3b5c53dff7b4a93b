"""A random matrix that is small enough for literal loops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncr_core.data import Interactions


def small_matrix(n_users: int = 25, n_items: int = 14, seed: int = 3) -> Interactions:
    """Some popular items and some rare; the last user and the last item have no interactions."""
    rng = np.random.default_rng(seed)
    chance = np.linspace(0.7, 0.1, n_items)
    chosen = rng.random((n_users, n_items)) < chance
    chosen[-1], chosen[:, -1] = False, False
    users, items = np.nonzero(chosen)
    order = rng.permutation(len(users))
    return Interactions.from_arrays(
        users,
        items,
        order,
        user_ids=[f"u{n}" for n in range(n_users)],
        item_ids=[f"i{n}" for n in range(n_items)],
    )


def dense(train: Interactions) -> npt.NDArray[np.float64]:
    """(n_users, n_items) of zeros and ones."""
    matrix = np.zeros((train.n_users, train.n_items))
    matrix[train.users, train.items] = 1.0
    return matrix
