"""The Interactions matrix: implicit feedback R ∈ {0,1} as CSR, each user's items in time order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ncr_core.data.stated import BoolArray, FloatArray, IntArray, Stated
from ncr_core.errors import DataError

__all__ = ["BoolArray", "FloatArray", "IdIndex", "IntArray", "Interactions", "build_interactions"]


@dataclass(frozen=True)
class Interactions:
    """Who interacted with what, oldest first.

    ``items[indptr[u]:indptr[u + 1]]`` are the items of user ``u`` from the oldest to the latest,
    each at most once. ``user_ids`` and ``item_ids`` give the client's ids of the rows and columns.
    ``weights`` (nnz,), above 0, are how much each entry counts in training beside the others; None:
    all the same. ``stated`` is what else is known of these users and items.
    """

    indptr: IntArray
    items: IntArray
    user_ids: Sequence[str] = field(repr=False)
    item_ids: Sequence[str] = field(repr=False)
    weights: FloatArray | None = field(default=None, repr=False)
    stated: Stated | None = field(default=None, repr=False)

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
        stated: Stated | None = None,
    ) -> Interactions:
        """Builds the matrix from parallel arrays of row and column indices, and of weights.

        ``order`` sorts a user's items from old to new; rows of equal order, and all rows when it is
        None, stay in the order given. Of a repeated (user, item) the latest occurrence is kept.
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
        return cls(indptr, items.astype(np.int64), user_ids, item_ids, weights, stated)

    @property
    def n_users(self) -> int:
        return len(self.user_ids)

    @property
    def n_items(self) -> int:
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
        return np.sort(self.users * self.n_items + self.items)

    def items_of(self, user: int | np.integer) -> IntArray:
        """The user's items, oldest first."""
        return self.items[self.indptr[user] : self.indptr[user + 1]]

    def item_counts(self) -> IntArray:
        """(n_items,) how many users interacted with each item."""
        return np.bincount(self.items, minlength=self.n_items).astype(np.int64)

    def contains(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether each (user, item) is an interaction; arrays of one shape."""
        keys = users * self.n_items + items
        if self.nnz == 0:
            return np.zeros(keys.shape, dtype=np.bool_)
        at = np.searchsorted(self.keys, keys)
        found: BoolArray = self.keys[np.minimum(at, self.nnz - 1)] == keys
        return found

    def select(self, mask: BoolArray) -> Interactions:
        """The same users and items with only the entries where ``mask`` (nnz,) holds."""
        indptr = np.zeros(self.n_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.users[mask], minlength=self.n_users), out=indptr[1:])
        weights = None if self.weights is None else self.weights[mask]
        return replace(self, indptr=indptr, items=self.items[mask], weights=weights)

    def reindex(self, user_ids: Sequence[str], item_ids: Sequence[str]) -> Interactions:
        """The same interactions on other rows and columns; unknown users and items are dropped."""
        renumbered = _positions(self.user_ids, user_ids), _positions(self.item_ids, item_ids)
        to_user, to_item = renumbered[0][self.users], renumbered[1][self.items]
        known = (to_user >= 0) & (to_item >= 0)
        return Interactions.from_arrays(
            to_user[known],
            to_item[known],
            user_ids=user_ids,
            item_ids=item_ids,
            weights=None if self.weights is None else self.weights[known],
            stated=None if self.stated is None else self.stated.renumbered(*renumbered),
        )

    def with_seen(self) -> Interactions:
        """Everything that users have seen: these items, and those that they have only seen."""
        if self.stated is None or len(self.stated.seen) == 0:
            return self
        return Interactions.from_arrays(
            np.concatenate([self.users, self.stated.seen[:, 0]]),
            np.concatenate([self.items, self.stated.seen[:, 1]]),
            user_ids=self.user_ids,
            item_ids=self.item_ids,
        )


class IdIndex:
    """Gives ids consecutive numbers in the order of their first appearance."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def number(self, key: str) -> int:
        return self._number.setdefault(key, len(self._number))

    def ids(self) -> list[str]:
        return list(self._number)


def build_interactions(rows: Iterable[tuple[str, str, float]]) -> Interactions:
    """Interactions from (user, item, order) rows, in one pass.

    Raises DataError when there is no row at all.
    """
    users, items = IdIndex(), IdIndex()
    flat: list[tuple[int, int]] = []
    order: list[float] = []
    for user, item, when in rows:
        flat.append((users.number(user), items.number(item)))
        order.append(when)
    if not flat:
        raise DataError("there are no interactions to learn from")
    pairs = np.array(flat, dtype=np.int64)
    return Interactions.from_arrays(
        pairs[:, 0],
        pairs[:, 1],
        np.array(order, dtype=np.float64),
        user_ids=users.ids(),
        item_ids=items.ids(),
    )


def _positions(old: Sequence[Hashable], new: Sequence[Hashable]) -> IntArray:
    where = {key: i for i, key in enumerate(new)}
    return np.array([where.get(key, -1) for key in old], dtype=np.int64)
