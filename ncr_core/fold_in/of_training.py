"""What training data say of users, as a fold-in takes it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.stated import Stated
from ncr_core.fold_in.evidence import Evidence


def evidence_of(
    data: Interactions, users: Iterable[int], item_rows: IntArray | None = None
) -> list[Evidence]:
    """The evidence of some users, by their rows in ``data``.

    ``item_rows`` (n_items,) are the model's rows of the items, where they are not the data's own.
    """
    rows = np.arange(data.n_items) if item_rows is None else item_rows
    stated = data.stated or Stated()
    disliked, pairs = _Grouped(stated.disliked), _Grouped(stated.pairs)
    found = []
    for user in users:
        own = slice(data.indptr[user], data.indptr[user + 1])
        not_wanted = disliked.places(user)
        found.append(
            Evidence(
                items=rows[data.items[own]],
                weights=None if data.weights is None else data.weights[own],
                disliked=rows[stated.disliked[not_wanted, 1]],
                disliked_weights=stated.disliked_weights[not_wanted],
                pairs=rows[stated.pairs[pairs.places(user), 1:]],
            )
        )
    return found


class _Grouped:
    """Rows that begin with a user, found by the user."""

    def __init__(self, rows: IntArray) -> None:
        self._order = np.argsort(rows[:, 0], kind="stable")
        self._users = rows[self._order, 0]

    def places(self, user: int) -> IntArray:
        first, last = np.searchsorted(self._users, [user, user + 1])
        result: IntArray = self._order[first:last]
        return result
