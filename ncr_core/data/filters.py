"""Filters of the Interactions matrix."""

from __future__ import annotations

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import DataError


def min_interactions(interactions: Interactions, at_least: int) -> Interactions:
    """Keeps the items with at least ``at_least`` interactions, in one pass (§5.1).

    One pass as in the paper: users are not filtered, and items are not counted again. Users that
    lose all their items leave the matrix. Raises DataError when nothing is left.
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
    """Drops users and items without interactions and renumbers the rest, order kept."""
    user_rows = np.flatnonzero(np.diff(interactions.indptr))
    item_rows = np.flatnonzero(interactions.item_counts())
    new_item = _renumber(item_rows, interactions.n_items)
    stated = interactions.stated
    if stated is not None:
        stated = stated.renumbered(_renumber(user_rows, interactions.n_users), new_item)
    lengths = np.diff(interactions.indptr)[user_rows]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Interactions(
        indptr,
        new_item[interactions.items],
        [interactions.user_ids[u] for u in user_rows.tolist()],
        [interactions.item_ids[i] for i in item_rows.tolist()],
        interactions.weights,
        stated,
    )


def _renumber(rows: IntArray, n: int) -> IntArray:
    new = np.full(n, -1, dtype=np.int64)
    new[rows] = np.arange(len(rows))
    return new
