"""Splits into training, validation and test items."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.errors import DataError

MIN_ITEMS = 3  # one to test on, one to validate on, and at least one to learn from


@dataclass(frozen=True)
class Split:
    """Training interactions and, for each user, the held-out items.

    ``validation`` and ``test`` are (n_users,) item indices, −1 for users with too few items, whose
    interactions are all in ``train``.
    """

    train: Interactions
    validation: IntArray
    test: IntArray

    @property
    def all_seen(self) -> Interactions:
        """Everything that was interacted with, held-out items included."""
        users = np.arange(self.train.n_users)
        held = [(users[x >= 0], x[x >= 0]) for x in (self.validation, self.test)]
        return Interactions.from_arrays(
            np.concatenate([self.train.users, *(u for u, _ in held)]),
            np.concatenate([self.train.items, *(i for _, i in held)]),
            user_ids=self.train.user_ids,
            item_ids=self.train.item_ids,
        )

    def with_validation_in_train(self) -> Self:
        """The split to refit on once the settings are chosen: no validation item is held out.

        Each becomes the latest training item of its user, with weight 1, and ``validation`` is −1
        throughout; the test items stay as they are.
        """
        users = np.flatnonzero(self.validation >= 0)
        weights = self.train.weights
        if weights is not None:
            weights = np.concatenate([weights, np.ones(len(users), np.float32)])
        train = Interactions.from_arrays(
            np.concatenate([self.train.users, users]),
            np.concatenate([self.train.items, self.validation[users]]),
            user_ids=self.train.user_ids,
            item_ids=self.train.item_ids,
            weights=weights,
            stated=self.train.stated,
        )
        return replace(self, train=train, validation=np.full_like(self.validation, -1))


def leave_latest_out(interactions: Interactions, users: BoolArray | None = None) -> Split:
    """The latest item of each user is for test, the second latest for validation (§5.1).

    What users said about items that are held out of theirs is left out of training too.

    ``users`` (n_users,) limits that to some users; all interactions of the others are for training.
    Raises DataError when no user has three items.
    """
    lengths = np.diff(interactions.indptr)
    enough = lengths >= MIN_ITEMS
    if not enough.any():
        raise DataError(
            f"no user has {MIN_ITEMS} items: one to learn from, one to validate on and one to "
            f"test on are needed (there are {interactions.n_users:,} users with "
            f"{interactions.nnz:,} interactions)"
        )
    if users is not None:
        enough &= users
    last = interactions.indptr[1:][enough] - 1
    mask = np.ones(interactions.nnz, dtype=np.bool_)
    mask[last] = False
    mask[last - 1] = False
    test = np.full(interactions.n_users, -1, dtype=np.int64)
    validation = test.copy()
    test[enough] = interactions.items[last]
    validation[enough] = interactions.items[last - 1]
    train = interactions.select(mask)
    if train.stated is not None:
        stated = train.stated.without_pairs_of(test).without_pairs_of(validation)
        train = replace(train, stated=stated)
    return Split(train, validation, test)
