"""A model's items in a state of the catalogue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalog.view import Catalogue
from app.recommend.precomputed import digest, usual_filters


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueRows:
    """The model's items as the catalogue has them at one moment."""

    seq: int
    internal: NDArray[np.int64]
    """(n_items,) the catalogue's id of each item row, −1 for items it does not have."""
    visible: NDArray[np.bool_]
    """(n_items,) what may be recommended at all."""
    epoch: str
    """A name that stays while ``visible`` does."""
    row_of: NDArray[np.int64]
    """The model's row of each of the catalogue's ids, −1 for items the model does not have."""

    def at(self, internal: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each of these of the catalogue's ids, −1 where there is none."""
        rows = np.full(len(internal), -1, dtype=np.int64)
        there = (internal >= 0) & (internal < len(self.row_of))
        rows[there] = self.row_of[internal[there]]
        return rows

    def of(self, internal: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of these of the catalogue's ids, in their order; of repeated ones the last."""
        rows = self.at(internal)
        rows = rows[rows >= 0]
        _, from_end = np.unique(rows[::-1], return_index=True)
        return rows[np.sort(len(rows) - 1 - from_end)]


def rows_in(
    catalogue: Catalogue, item_ids: Sequence[str], before: CatalogueRows | None
) -> CatalogueRows:
    """The items in this state of the catalogue; ``before`` are the same ones in an earlier one."""
    ids = catalogue.internal_ids
    if before is None:
        internal = np.array([ids.get(item, -1) for item in item_ids], dtype=np.int64)
    else:  # an id is for good: only what was not there can have changed
        internal = before.internal
        new = {
            row: found
            for row in np.flatnonzero(internal < 0).tolist()
            if (found := ids.get(item_ids[row])) is not None
        }
        if new:
            internal = internal.copy()
            internal[list(new)] = list(new.values())
    visible = np.zeros(len(internal), dtype=np.bool_)
    there = internal >= 0
    visible[there] = catalogue.visible[internal[there]]
    if before is not None and internal is before.internal:
        row_of = before.row_of
    else:
        row_of = np.full(int(internal.max(initial=-1)) + 1, -1, dtype=np.int64)
        row_of[internal[there]] = np.flatnonzero(there)
    return CatalogueRows(catalogue.seq, internal, visible, digest(visible), row_of)


def filters_key(rows: CatalogueRows, exclude_seen: bool, categories: tuple[str, ...]) -> Hashable:
    """What decides which of the model's items a user's candidates may be taken from."""
    # A change of the catalogue that hides and shows nothing leaves candidates as they are.
    if not categories:
        return usual_filters(rows.epoch) if exclude_seen else (False, rows.epoch)
    return (exclude_seen, categories, rows.seq)
