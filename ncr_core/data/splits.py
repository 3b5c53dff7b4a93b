"""Splits into training, validation and test items."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.errors import DataError

HashArray = npt.NDArray[np.uint64]


def hashes_of(user_ids: Sequence[str]) -> HashArray:
    """(n,) hashes of ids, the same wherever and whenever they are computed."""
    digests = b"".join(hashlib.blake2b(i.encode(), digest_size=8).digest() for i in user_ids)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.2, 1_000, 10_000  # users


def hold_out_users(
    interactions: Interactions,
    share: float = HELD_OUT_SHARE,
    at_least: int = MIN_HELD_OUT,
    at_most: int = MAX_HELD_OUT,
) -> tuple[BoolArray, BoolArray]:
    """The users with the smallest hashes: those to hold out from, and all below the same bound.

    Of the users that have enough items, ``share``, and between ``at_least`` and ``at_most`` of
    them. A user stays on one side of the bound from training to training but where it moves: it
    falls where only as many users as before are taken of more. The second (n_users,) mask holds,
    beside the first, users with too few items as yet.
    """
    eligible = np.flatnonzero(np.diff(interactions.indptr) >= MIN_ITEMS)
    n = min(len(eligible), at_most, max(at_least, round(share * len(eligible))))
    chosen = np.zeros(interactions.n_users, dtype=np.bool_)
    hashes = hashes_of(interactions.user_ids)
    chosen[eligible[np.argsort(hashes[eligible], kind="stable")[:n]]] = True
    if n == len(eligible):
        return chosen, np.ones_like(chosen)
    bound = hashes[chosen].max() if n else np.uint64(0)
    return chosen, hashes <= bound


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

    @cached_property
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
            feedback=self.train.feedback,
        )
        return replace(self, train=train, validation=np.full_like(self.validation, -1))


def leave_latest_out(interactions: Interactions, users: BoolArray | None = None) -> Split:
    """The latest item of each user is for test, the second latest for validation (§5.1).

    What users said about items that are held out of theirs is left out of training too.

    Args:
        interactions: what to split.
        users: (n_users,) the users to hold out from, None for all; all interactions of the others
            are for training.

    Raises:
        DataError: no user has three items.
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
    if train.feedback is not None:
        feedback = train.feedback.without_pairs_about(test).without_pairs_about(validation)
        train = replace(train, feedback=feedback)
    return Split(train, validation, test)


def check_rankable(split: Split) -> None:
    """Raises DataError where a user has nothing left to be compared with."""
    seen = split.all_seen
    lengths = seen.indptr[1:] - seen.indptr[:-1]
    full = (lengths >= seen.n_items).nonzero()[0]
    if len(full):
        raise DataError(
            f"{len(full):,} users, among them {seen.user_ids[full[0]]!r}, have interacted with "
            f"all {seen.n_items:,} items: there is nothing to rank for them, leave them out"
        )
