"""Splits into training, validation and test items."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from typing import Self

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import (
    BoolArray,
    IntArray,
    Interactions,
    TimeArray,
    compact,
    row_indices,
)
from ncr_core.errors import ConfigError, DataError

HashArray = npt.NDArray[np.uint64]

USERS_AT_ONCE = 2**16


def hashes_of(user_ids: Sequence[str]) -> HashArray:
    """(n,) hashes of ids, the same on every machine and in every process."""
    hashes = np.empty(len(user_ids), dtype=np.uint64)
    ids = iter(user_ids)
    for first in range(0, len(hashes), USERS_AT_ONCE):
        some = islice(ids, USERS_AT_ONCE)
        digests = b"".join(hashlib.blake2b(i.encode(), digest_size=8).digest() for i in some)
        hashes[first : first + USERS_AT_ONCE] = np.frombuffer(digests, dtype=">u8")
    return hashes


HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.2, 1_000, 10_000  # users


def hold_out_users(
    interactions: Interactions,
    share: float = HELD_OUT_SHARE,
    at_least: int = MIN_HELD_OUT,
    at_most: int = MAX_HELD_OUT,
) -> tuple[BoolArray, BoolArray]:
    """(n_users,) masks of the users to hold out from, and of all users up to the same hash bound.

    The users to hold out from have the smallest hashes of the users with enough items: the share
    ``share``, but at least ``at_least`` and at most ``at_most`` users. From training to training, a
    user changes sides only if the bound moves. The bound falls where the same number of users is
    taken from more users. The second mask also holds users with too few items as yet. Both masks
    have users alone whose vectors a model keeps, see ``Interactions.remembered``.
    """
    remembered = interactions.n_remembered
    eligible = np.flatnonzero(np.diff(interactions.indptr[: remembered + 1]) >= MIN_ITEMS)
    n = min(len(eligible), at_most, max(at_least, round(share * len(eligible))))
    chosen = np.zeros(interactions.n_users, dtype=np.bool_)
    hashes = hashes_of(interactions.user_ids)
    chosen[eligible[np.argsort(hashes[eligible], kind="stable")[:n]]] = True
    compared = np.arange(len(hashes)) < remembered
    if n < len(eligible):
        compared &= hashes <= (hashes[chosen].max() if n else np.uint64(0))
    return chosen, compared


MIN_ITEMS = 3  # one to test on, one to validate on, and at least one to learn from


@dataclass(frozen=True)
class Split:
    """Training interactions and, for each user, the held-out items.

    ``validation`` and ``test`` are (n_users,) item indices, −1 for users with too few items. All
    interactions of users with too few items are in ``train``.
    """

    train: Interactions
    validation: IntArray
    test: IntArray

    @cached_property
    def all_seen(self) -> Interactions:
        """All interactions, including those with held-out items."""
        users = np.arange(self.train.n_users)
        held = [(users[x >= 0], x[x >= 0]) for x in (self.validation, self.test)]
        return Interactions.from_arrays(
            np.concatenate([self.train.users, *(u for u, _ in held)]),
            np.concatenate([self.train.items, *(i for _, i in held)]),
            user_ids=self.train.user_ids,
            item_ids=self.train.item_ids,
        )

    def seen_items(self, user: int | np.integer) -> IntArray:
        """(k,) the items of ``all_seen`` of one user, without all others in memory."""
        return _with_items(self.train.items_of(user), {self.validation[user], self.test[user]})

    def with_validation_in_train(self) -> Self:
        """The split for a refit with the chosen settings: no validation item is held out.

        Each validation item becomes the latest training item of its user, with weight 1, and
        ``validation`` is −1 for all users. The test items stay unchanged.
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


def _with_items(items: IntArray, more: set[np.int64]) -> IntArray:
    """The items and those of ``more`` that are not among them; −1 is none."""
    new = [item for item in more if item >= 0 and not (items == item).any()]
    return np.append(items, np.array(new, dtype=np.int64))


def leave_latest_out(interactions: Interactions, users: BoolArray | None = None) -> Split:
    """The latest item of each user is for test, the second latest for validation (§5.1).

    The training leaves out a user's stated preferences about the user's held-out items too.

    Args:
        interactions: the interactions to split.
        users: (n_users,) the users to hold out from, None for all; all interactions of other users
            are for training.

    Raises:
        DataError: no user has three items.
    """
    lengths = np.diff(interactions.indptr)
    enough = lengths >= MIN_ITEMS
    if not enough.any():
        raise DataError(
            f"no user has {MIN_ITEMS} items for training, validation and test (the data has "
            f"{interactions.n_users:,} users with {interactions.nnz:,} interactions)"
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


@dataclass(frozen=True)
class NextItemSplit(Split):
    """A split whose validation items are input at test time, and never trained on."""

    untrained_test_items: int = 0
    """The number of users without a test item here, because training does not have the item."""

    @property
    def test_input(self) -> Interactions:
        """The input of rankings at test time: training items, then the validation item.

        Users and items are numbered as in ``train``.
        """
        return self.with_validation_in_train().train


@dataclass(frozen=True)
class ItemSetSplit(Split):
    """A split with a set of test items for each user, in no order.

    ``test`` has one of them for each user, −1 for users without test items.
    """

    test_items: Interactions
    """The test items of all users, with the users and items of ``train``."""

    @cached_property
    def all_seen(self) -> Interactions:
        """The training and validation items, which lists leave out; no test item is among them."""
        return self.with_validation_in_train().train

    def seen_items(self, user: int | np.integer) -> IntArray:
        """See ``Split.seen_items``."""
        return _with_items(self.train.items_of(user), {self.validation[user]})


@dataclass(frozen=True)
class TemporalSplit(NextItemSplit):
    """A split at one time for all users, see `temporal_split`."""

    cut: float = 0.0
    """The time of the split, in seconds since 1970."""

    gaps: TimeArray = field(default_factory=lambda: np.zeros(0))
    """(n_users,) seconds from a user's last item before the cut to the test item; NaN if none."""

    newcomers: int = 0
    """The number of users without a kept item before the cut, who are not part of the split."""


QUANTILE = 0.9


def temporal_split(
    interactions: Interactions, quantile: float = QUANTILE, at_least: int = 1
) -> TemporalSplit:
    """Splits at the time before which the share ``quantile`` of all interactions lies.

    The test item of a user with items on both sides is the first item after the cut; later items
    are left out. The latest item before the cut of a user with two or more is for validation. All
    other items before the cut are for training, so training learns no later item. The split has the
    users and items before the cut, renumbered.

    Args:
        interactions: the interactions to split, with times.
        quantile: between 0 and 1.
        at_least: how many interactions before the cut an item needs to be kept.

    Raises:
        ConfigError: the quantile is not between 0 and 1.
        DataError: the interactions have no times, or no user has items on both sides of the cut.
    """
    if not 0 < quantile < 1:
        raise ConfigError(f"the quantile must be between 0 and 1, not {quantile}")
    times = interactions.times
    if times is None:
        raise DataError(
            "the data set has no times: a temporal split needs the time of each interaction"
        )
    cut = float(np.quantile(times, quantile))
    before = times < cut
    counts = np.bincount(interactions.items[before], minlength=interactions.n_items)
    past = _before_cut(interactions, before & (counts >= at_least)[interactions.items], cut)
    rows = row_indices(past.user_ids, interactions.user_ids)
    columns = row_indices(interactions.item_ids, past.item_ids)
    validation = np.full(past.n_users, -1, dtype=np.int64)
    test, gaps = validation.copy(), np.full(past.n_users, np.nan)
    mask = np.ones(past.nnz, dtype=np.bool_)
    with_two = np.flatnonzero(np.diff(past.indptr) >= 2)
    latest = past.indptr[1:] - 1
    validation[with_two] = past.items[latest[with_two]]
    mask[latest[with_two]] = False
    # A user's items are in the order of time, so those after the cut stand at the end.
    passed = np.concatenate([[0], np.cumsum(before)])[interactions.indptr]
    first_after = interactions.indptr[:-1] + np.diff(passed)
    both_sides = np.flatnonzero(first_after[rows] < interactions.indptr[1:][rows])
    first = first_after[rows[both_sides]]
    # Counted from the latest item of all before the cut, one that was dropped as rare included.
    gaps[both_sides] = times[first] - times[first - 1]
    test[both_sides] = columns[interactions.items[first]]
    train = past.select(mask)
    trained = train.item_counts() > 0
    known = (test >= 0) & trained[test]
    untrained = len(both_sides) - int(known.sum())
    test[~known], gaps[~known] = -1, np.nan
    if not known.any():
        raise DataError(
            f"no user has an item before {_when(cut)} and, after it, one that training has: "
            "choose another quantile"
        )
    newcomers = interactions.n_users - past.n_users
    return TemporalSplit(train, validation, test, untrained, cut, gaps, newcomers)


def _before_cut(interactions: Interactions, mask: BoolArray, cut: float) -> Interactions:
    """The entries of the mask, with their users and items alone. Raises DataError if empty."""
    if not mask.any():
        raise DataError(f"no interaction is left before {_when(cut)}: choose another quantile")
    return compact(interactions.select(mask))


def _when(seconds: float) -> str:
    """The text for messages of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")


def check_rankable(split: Split) -> None:
    """Raises DataError if a user has interacted with all items, so that no rival is left."""
    train = split.train
    most = np.diff(train.indptr) + (split.validation >= 0) + (split.test >= 0)
    many = np.flatnonzero(most >= train.n_items)
    full = [user for user in many if len(split.seen_items(user)) >= train.n_items]
    if full:
        first = train.user_ids[int(full[0])]
        raise DataError(
            f"{len(full):,} users, among them {first!r}, have interacted with all "
            f"{train.n_items:,} items: leave these users out"
        )
