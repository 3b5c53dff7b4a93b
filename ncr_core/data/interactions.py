"""The Interactions matrix: implicit feedback R ∈ {0,1} as CSR, each user's items in time order.

The `UserFeedback` is the other feedback: items only seen, dislikes, and stated preferences.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ncr_core.data.array_storage import IN_MEMORY, ArrayStorage
from ncr_core.errors import DataError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
TimeArray = npt.NDArray[np.float64]

BLOCK = 2**22  # entries that a copy takes at a time


def _no_rows(width: int) -> IntArray:
    return np.zeros((0, width), dtype=np.int64)


def _no_weights() -> FloatArray:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class UserFeedback:
    """Feedback by the user rows and item columns of the `Interactions` that it belongs to.

    A user's ``seen`` and ``disliked`` items are not among the user's positives.
    """

    seen: IntArray = field(default_factory=lambda: _no_rows(2))
    """(S, 2) user and item: the item is neither a negative nor a positive of the user."""
    disliked: IntArray = field(default_factory=lambda: _no_rows(2))
    """(D, 2) user and item: a loser against every positive of the user."""
    disliked_weights: FloatArray = field(default_factory=_no_weights)
    """(D,) weights, above 0."""
    pairs: IntArray = field(default_factory=lambda: _no_rows(3))
    """(P, 3) user, winner and loser of each stated preference."""
    pair_weights: FloatArray = field(default_factory=_no_weights)
    """(P,) weights, above 0."""

    def __len__(self) -> int:
        return len(self.seen) + len(self.disliked) + len(self.pairs)

    def reindexed(self, user_index: IntArray, item_index: IntArray) -> UserFeedback:
        """The feedback on other rows and columns, without dropped users and items.

        Args:
            user_index: (n_users,) the new row of each old one, −1 for dropped users.
            item_index: (n_items,) the new column of each old one, −1 for dropped items.
        """
        seen, disliked = (
            np.stack([user_index[part[:, 0]], item_index[part[:, 1]]], axis=1)
            for part in (self.seen, self.disliked)
        )
        user, winner, loser = self.pairs.T
        pairs = np.stack([user_index[user], item_index[winner], item_index[loser]], axis=1)
        keep_seen, keep_disliked, keep_pairs = (
            (part >= 0).all(axis=1) for part in (seen, disliked, pairs)
        )
        return UserFeedback(
            seen[keep_seen],
            disliked[keep_disliked],
            self.disliked_weights[keep_disliked],
            pairs[keep_pairs],
            self.pair_weights[keep_pairs],
        )

    def of_rows(self, rows: IntArray, n_users: int) -> UserFeedback:
        """The feedback of these of ``n_users`` users alone, renumbered."""
        index = np.full(n_users, -1, dtype=np.int64)
        index[rows] = np.arange(len(rows))
        keep_seen, keep_disliked, keep_pairs = (
            index[part[:, 0]] >= 0 for part in (self.seen, self.disliked, self.pairs)
        )
        kept = self.seen[keep_seen], self.disliked[keep_disliked], self.pairs[keep_pairs]
        for part in kept:
            part[:, 0] = index[part[:, 0]]
        seen, disliked, pairs = kept
        return UserFeedback(
            seen,
            disliked,
            self.disliked_weights[keep_disliked],
            pairs,
            self.pair_weights[keep_pairs],
        )

    def without_pairs_about(self, held_out: IntArray) -> UserFeedback:
        """The feedback without stated preferences about the user's held-out item.

        Args:
            held_out: (n_users,) the held-out item of each user, −1 where there is none.
        """
        item = held_out[self.pairs[:, 0]]
        keep: BoolArray = (self.pairs[:, 1] != item) & (self.pairs[:, 2] != item)
        if keep.all():
            return self
        return replace(self, pairs=self.pairs[keep], pair_weights=self.pair_weights[keep])


@dataclass(frozen=True, eq=False)
class Interactions:
    """The items of each user, oldest first.

    ``items[indptr[u]:indptr[u + 1]]`` are the items of user ``u`` from the oldest to the latest,
    each at most once. ``user_ids`` and ``item_ids`` give the client's ids of the rows and columns.
    ``weights`` (nnz,), above 0, are the entries' weights in training; None: all count the same.
    ``feedback`` is the other feedback of these users on these items. ``times`` (nnz,) are the
    entries' times in seconds since 1970; None: only the order is known. ``storage`` makes the
    arrays of copies of this matrix, and of the vectors of users that are pooled from it.
    ``remembered`` is the number of users, the first ones, whose pooled vectors a model keeps; None:
    all. A fold-in makes the vectors of all others from their items.
    """

    indptr: IntArray
    items: IntArray
    user_ids: Sequence[str] = field(repr=False)
    item_ids: Sequence[str] = field(repr=False)
    weights: FloatArray | None = field(default=None, repr=False)
    feedback: UserFeedback | None = field(default=None, repr=False)
    times: TimeArray | None = field(default=None, repr=False)
    storage: ArrayStorage = field(default=IN_MEMORY, repr=False)
    remembered: int | None = None

    @classmethod
    def from_arrays(
        cls,
        users: IntArray,
        items: IntArray,
        order: npt.NDArray[np.generic] | None = None,
        *,
        user_ids: Sequence[str],
        item_ids: Sequence[str],
        weights: FloatArray | None = None,
        feedback: UserFeedback | None = None,
        times: TimeArray | None = None,
    ) -> Interactions:
        """Builds the matrix from parallel arrays of row and column indices, weights and times.

        ``order`` sorts a user's items from old to new. Rows of equal order, and all rows if
        ``order`` is None, stay in the given order. Of a repeated (user, item) the latest occurrence
        is kept.
        """
        n_users, n_items = len(user_ids), len(item_ids)
        position = np.arange(len(users))
        by_time = np.lexsort((position, users) if order is None else (position, order, users))
        users, items = users[by_time], items[by_time]
        keys = users * n_items + items
        # np.unique keeps first occurrences, so look from the latest end.
        _, first_from_end = np.unique(keys[::-1], return_index=True)
        kept = np.sort(len(keys) - 1 - first_from_end)
        users, items = users[kept], items[kept]
        indptr = np.zeros(n_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(users, minlength=n_users), out=indptr[1:])
        if weights is not None:
            weights = weights[by_time][kept]
        if times is not None:
            times = times[by_time][kept]
        return cls(indptr, items.astype(np.int64), user_ids, item_ids, weights, feedback, times)

    @property
    def n_users(self) -> int:
        """The number of users, the rows."""
        return len(self.user_ids)

    @property
    def n_remembered(self) -> int:
        """The number of users whose pooled vectors a model keeps."""
        return self.n_users if self.remembered is None else min(self.remembered, self.n_users)

    @property
    def n_items(self) -> int:
        """The number of items, the columns."""
        return len(self.item_ids)

    @property
    def nnz(self) -> int:
        """The number of interactions."""
        return len(self.items)

    @cached_property
    def users(self) -> IntArray:
        """(nnz,) the user of each entry of ``items``."""
        return np.repeat(np.arange(self.n_users), np.diff(self.indptr))

    @cached_property
    def keys(self) -> IntArray:
        """(nnz,) user · n_items + item, ascending: for look-ups by binary search."""
        keys = self.storage.zeros(self.nnz, np.int64)
        for users in blocks_of_rows(self.indptr):
            part = slice(self.indptr[users.start], self.indptr[users.stop])
            lengths = np.diff(self.indptr[users.start : users.stop + 1])
            keys[part] = np.repeat(np.arange(users.start, users.stop) * self.n_items, lengths)
            keys[part] += self.items[part]
            keys[part].sort()
        return keys

    def entries_of(self, users: BoolArray) -> BoolArray:
        """(nnz,) mask of the entries of some users, by the (n_users,) mask of the users."""
        return np.repeat(users, np.diff(self.indptr))

    def items_of(self, user: int | np.integer) -> IntArray:
        """The user's items, oldest first."""
        return self.items[self.indptr[user] : self.indptr[user + 1]]

    def gaps(self) -> TimeArray | None:
        """(nnz,) seconds since the user's previous entry, 0 for the first; None without times."""
        if self.times is None:
            return None
        gaps = np.diff(self.times, prepend=0.0)
        gaps[self.indptr[:-1][np.diff(self.indptr) > 0]] = 0.0
        return gaps

    def item_counts(self) -> IntArray:
        """(n_items,) how many users interacted with each item."""
        return np.bincount(self.items, minlength=self.n_items).astype(np.int64)

    def contains(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether each (user, item) is an interaction; arrays of one shape."""
        keys = users * self.n_items + items
        if self.nnz == 0:
            return np.zeros(keys.shape, dtype=np.bool_)
        position = np.searchsorted(self.keys, keys)
        present: BoolArray = self.keys[np.minimum(position, self.nnz - 1)] == keys
        return present

    def select(self, mask: BoolArray) -> Interactions:
        """The same users and items with only the entries where ``mask`` (nnz,) holds."""
        arrays = self._empty_arrays(int(np.count_nonzero(mask)))
        indptr = np.empty_like(self.indptr)
        n = row = 0
        for first in range(0, self.nnz, BLOCK):
            kept = np.flatnonzero(mask[first : first + BLOCK])
            until = int(np.searchsorted(self.indptr, first + BLOCK))
            indptr[row:until] = n + np.searchsorted(kept, self.indptr[row:until] - first)
            kept += first
            for name, values in arrays.items():
                values[n : n + len(kept)] = getattr(self, name)[kept]
            n, row = n + len(kept), until
        indptr[row:] = n
        return self._with_arrays(indptr, arrays)

    def of_rows(self, rows: IntArray) -> Interactions:
        """The interactions of these users alone, renumbered, without their ids and feedback."""
        lengths = np.diff(self.indptr)[rows]
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        arrays = self._empty_arrays(int(indptr[-1]))
        for some in blocks_of_rows(indptr):
            part = slice(indptr[some.start], indptr[some.stop])
            starts = self.indptr[rows[some]] - indptr[some]
            index = np.repeat(starts, lengths[some]) + np.arange(part.start, part.stop)
            for name, values in arrays.items():
                values[part] = getattr(self, name)[index]
        theirs = self._with_arrays(indptr, arrays)
        return replace(theirs, user_ids=[""] * len(rows), feedback=None, remembered=None)

    def _with_arrays(self, indptr: IntArray, arrays: dict[str, npt.NDArray[Any]]) -> Interactions:
        weights, times = arrays.get("weights"), arrays.get("times")
        return replace(self, indptr=indptr, items=arrays["items"], weights=weights, times=times)

    def _empty_arrays(self, n: int) -> dict[str, npt.NDArray[Any]]:
        """Arrays for ``n`` entries, by the names of the fields of this matrix that have them."""
        fields = {"items": self.items, "weights": self.weights, "times": self.times}
        return {
            name: self.storage.zeros(n, values.dtype)
            for name, values in fields.items()
            if values is not None
        }

    def reindex(self, user_ids: Sequence[str], item_ids: Sequence[str]) -> Interactions:
        """The same interactions on other rows and columns; unknown users and items are dropped."""
        same_users = user_ids is self.user_ids
        of_users = np.arange(self.n_users) if same_users else row_indices(self.user_ids, user_ids)
        new_indices = of_users, row_indices(self.item_ids, item_ids)
        to_user, to_item = new_indices[0][self.users], new_indices[1][self.items]
        known = (to_user >= 0) & (to_item >= 0)
        return Interactions.from_arrays(
            to_user[known],
            to_item[known],
            user_ids=user_ids,
            item_ids=item_ids,
            weights=None if self.weights is None else self.weights[known],
            feedback=None if self.feedback is None else self.feedback.reindexed(*new_indices),
            times=None if self.times is None else self.times[known],
        )

    def with_seen(self) -> Interactions:
        """All items that users have seen: these interactions, and the items only seen."""
        if self.feedback is None or len(self.feedback.seen) == 0:
            return self
        seen = self.feedback.seen
        if (seen[1:, 0] < seen[:-1, 0]).any():
            seen = seen[np.argsort(seen[:, 0], kind="stable")]
        seen_until = np.searchsorted(seen[:, 0], np.arange(self.n_users + 1))
        items = self.storage.zeros(self.nnz + len(seen), np.int64)
        indptr, n = np.zeros_like(self.indptr), 0
        for users in blocks_of_rows(self.indptr + seen_until):
            part = slice(self.indptr[users.start], self.indptr[users.stop])
            lengths = np.diff(self.indptr[users.start : users.stop + 1])
            own = np.repeat(np.arange(len(lengths)), lengths)
            more = seen[seen_until[users.start] : seen_until[users.stop]]
            block = Interactions.from_arrays(
                np.concatenate([own, more[:, 0] - users.start]),
                np.concatenate([self.items[part], more[:, 1]]),
                user_ids=[""] * len(lengths),
                item_ids=self.item_ids,
            )
            items[n : n + block.nnz] = block.items
            indptr[users.start + 1 : users.stop + 1] = n + block.indptr[1:]
            n += block.nnz
        return replace(
            self, indptr=indptr, items=items[:n], weights=None, feedback=None, times=None
        )


def blocks_of_rows(indptr: IntArray) -> Iterator[slice]:
    """Rows by the places where they begin: about ``BLOCK`` entries at a time, whole rows."""
    first, n = 0, len(indptr) - 1
    while first < n:
        until = int(np.searchsorted(indptr, indptr[first] + BLOCK, "right")) - 1
        until = max(until, first + 1)
        yield slice(first, until)
        first = until


class IdIndex:
    """Gives ids consecutive numbers in the order of their first appearance."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def number(self, key: str) -> int:
        """The number of an id, the next one if it is new."""
        return self._number.setdefault(key, len(self._number))

    def ids(self) -> list[str]:
        """The ids in the order of their numbers."""
        return list(self._number)


def build_interactions(
    rows: Iterable[tuple[str, str, float]], *, timed: bool = False
) -> Interactions:
    """Interactions from (user, item, order) rows, in one pass.

    With ``timed`` the order is in seconds since 1970, and is kept as ``times``. Raises DataError if
    there is no row.
    """
    users, items = IdIndex(), IdIndex()
    user_rows, item_rows, order = array("q"), array("q"), array("d")
    for user, item, when in rows:
        user_rows.append(users.number(user))
        item_rows.append(items.number(item))
        order.append(when)
    if not user_rows:
        raise DataError("the data has no interactions to learn from")
    seconds = np.array(order, dtype=np.float64)
    return Interactions.from_arrays(
        np.array(user_rows, dtype=np.int64),
        np.array(item_rows, dtype=np.int64),
        seconds,
        user_ids=users.ids(),
        item_ids=items.ids(),
        times=seconds if timed else None,
    )


def row_indices(ids: Sequence[Hashable], all_ids: Sequence[Hashable]) -> IntArray:
    """(n,) the index of each of ``ids`` in ``all_ids``, −1 for missing ids."""
    if len(ids) < len(all_ids):  # a dictionary takes over 100 B an id
        place = {key: n for n, key in enumerate(ids)}
        if len(place) == len(ids):
            found = np.full(len(ids), -1, dtype=np.int64)
            for row, key in enumerate(all_ids):
                if key in place:
                    found[place[key]] = row
            return found
    index = {key: row for row, key in enumerate(all_ids)}
    return np.fromiter((index.get(key, -1) for key in ids), np.int64, len(ids))


def ids_of_rows(ids: Sequence[str], rows: IntArray) -> Sequence[str]:
    """The ids of some rows."""
    take = getattr(ids, "take", None)  # of `snapshot.Ids`, whose ids are slow one by one
    taken: Sequence[str] = [ids[row] for row in rows.tolist()] if take is None else take(rows)
    return taken


def min_interactions(interactions: Interactions, at_least: int) -> Interactions:
    """Keep the items with at least ``at_least`` interactions, in one pass (§5.1).

    One pass as in the paper: users are not filtered, and items are not counted again. Users that
    lose all their items leave the matrix. Raises DataError if no item is left.
    """
    counts = interactions.item_counts()
    kept = interactions.select((counts >= at_least)[interactions.items])
    if kept.nnz == 0:
        raise DataError(
            f"no item has {at_least} interactions: nothing is left of "
            f"{interactions.nnz:,} interactions on {interactions.n_items:,} items"
        )
    return compact(kept)


def compact(interactions: Interactions) -> Interactions:
    """Drop users and items without interactions, and renumber the rest in the same order."""
    user_rows = np.flatnonzero(np.diff(interactions.indptr))
    item_rows = np.flatnonzero(interactions.item_counts())
    new_item = _renumber(item_rows, interactions.n_items)
    feedback = interactions.feedback
    if feedback is not None:
        feedback = feedback.reindexed(_renumber(user_rows, interactions.n_users), new_item)
    lengths = np.diff(interactions.indptr)[user_rows]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    remembered = interactions.remembered
    if remembered is not None:
        remembered = int(np.searchsorted(user_rows, remembered))
    items = interactions.storage.zeros(interactions.nnz, np.int64)
    for first in range(0, interactions.nnz, BLOCK):
        part = slice(first, first + BLOCK)
        items[part] = new_item[interactions.items[part]]
    return replace(
        interactions,
        indptr=indptr,
        items=items,
        user_ids=ids_of_rows(interactions.user_ids, user_rows),
        item_ids=ids_of_rows(interactions.item_ids, item_rows),
        feedback=feedback,
        remembered=remembered,
    )


def _renumber(rows: IntArray, n: int) -> IntArray:
    new = np.full(n, -1, dtype=np.int64)
    new[rows] = np.arange(len(rows))
    return new
