"""What a list's filter leaves of the items, looked up once a request."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalog.masks import MAX_INLINE_ITEMS, FilterMask, SelectedRows
from app.catalog.service import CatalogService
from app.catalog.snapshot import Catalogue
from app.recommend.schemas import RecommendationQuery


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The items that a query's filter leaves, in a state of the catalogue."""

    mask: FilterMask | None
    """None: all items."""
    state: Hashable
    """What lists depend on of it."""

    def allowed(self, size: int) -> NDArray[np.bool_] | None:
        """(size,) by internal id: what the filter leaves; None for all. Nobody writes to it."""
        return None if self.mask is None else self.mask.of(size)

    def rows(self, internal: NDArray[np.int64]) -> SelectedRows | None:
        """The rows of a model that the filter leaves, as `FilterMask.rows`; None for all."""
        return None if self.mask is None else self.mask.rows(internal)

    def fitting(self, ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """The positions of the internal ids that the filter leaves; −1 is an unknown item."""
        if self.mask is None:
            return np.arange(len(ids))
        # Behind the last id there is none: what an item without attributes gets.
        return np.flatnonzero(self.mask.of(size + 1)[np.where(ids < 0, size, ids)])

    async def prepare(self, internal: NDArray[np.int64]) -> None:
        """Has the rows of a model ready; ``internal`` (n_items,) are the ids of its rows.

        Of many items it is done in a thread.
        """
        if self.mask is not None and not self.mask.has_rows(internal):
            if len(internal) <= MAX_INLINE_ITEMS:
                self.mask.rows(internal)
            else:
                await asyncio.to_thread(self.mask.rows, internal)


async def select(
    catalog: CatalogService, catalogue: Catalogue, query: RecommendationQuery
) -> Selection | None:
    """What a query selects; None where it has no filter.

    Raises:
        Unprocessable: the filter compares values of a kind that no item has.
    """
    wanted = query.filter
    if wanted is None:
        return None
    mask = await catalog.mask(wanted, catalogue)
    return Selection(mask, (wanted.key, catalogue.attributes.state(wanted.names)))
