"""Lists of newcomers, which are the nearer to popularity the fewer items a user has."""

from __future__ import annotations

import numpy as np
import torch

from ncr_core.data.interactions import Interactions
from ncr_core.models import PairwiseRanker
from ncr_core.models.user_embeddings import LENGTHS, PooledUsers
from ncr_core.training.gaps import item_vectors, popularity_vector

POPULARITY_WEIGHTS = {1: 2.0, 2: 1.5, 3: 1.0, 5: 1.0}  # by classes of LENGTHS
MAX_NEWCOMERS = 0.05  # of the users


def has_few_newcomers(train: Interactions) -> bool:
    """Whether users with few items are too few to influence validation."""
    newcomers = np.diff(train.indptr) <= max(POPULARITY_WEIGHTS)
    return bool(newcomers.mean() <= MAX_NEWCOMERS)


@torch.no_grad()
def shrink_newcomers(model: PairwiseRanker, train: Interactions) -> bool:
    """Adds popularity to the offsets that rank for users with few items.

    The offsets from a training separate the best few items well. They say less about the other
    items than popularity does. Models without offsets by the number of items and models with a
    tower stay unchanged.

    Args:
        model: a model that was trained on ``train``.
        train: the interactions.

    Returns:
        Whether the model changed.
    """
    users = model.user_parts()[0]
    if model.config.kind != "nbpr" or not model.config.by_length or train.nnz == 0:
        return False
    assert isinstance(users, PooledUsers)  # noqa: S101 - `by_length` says so
    counts = torch.from_numpy(train.item_counts()).float().to(model.device)
    popular = popularity_vector(item_vectors(model), counts)
    if not bool(popular.isfinite().all()):
        return False
    for items, weight in POPULARITY_WEIGHTS.items():
        users.offset[LENGTHS.index(items)] += weight * popular
    return True
