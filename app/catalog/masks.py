"""Masks of the items that fit a filter, made once for a state of the attributes."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalog.filters import AttributeFilter
from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache, SingleFlight

Bools = NDArray[np.bool_]
MAX_INLINE_ITEMS = 20_000  # of a larger catalogue, masks are made in a thread
FEW_ROWS = 2_000  # of a model: so few are ranked without a search
OVERHEAD_BYTES = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """The rows of a model whose items fit a filter."""

    mask: Bools
    """(n_items,)."""
    few: NDArray[np.int64] | None
    """The rows, ascending; None if they are more than ``FEW_ROWS``."""


class FilterMask:
    """The items that fit a filter, also in later states with the same attributes."""

    def __init__(self, by_id: Bools, otherwise: bool) -> None:
        self._by_id = by_id
        self._otherwise = otherwise  # of items that came later, without attributes
        self._rows: tuple[NDArray[np.int64], SelectedRows] | None = None

    def of(self, size: int) -> Bools:
        """(size,) whether an item fits, by internal id. Callers must not change the array."""
        mask = self._by_id
        if len(mask) < size:
            longer = np.full(size, self._otherwise, np.bool_)
            longer[: len(mask)] = mask
            self._by_id = mask = longer
        return mask[:size]

    def has_rows(self, internal: NDArray[np.int64]) -> bool:
        """Whether the result of `rows` for the same array is cached."""
        kept = self._rows
        return kept is not None and kept[0] is internal

    def rows(self, internal: NDArray[np.int64]) -> SelectedRows:
        """The rows of a model; ``internal`` (n_items,) has the id of each row, −1 for none."""
        kept = self._rows
        if kept is None or kept[0] is not internal:
            mask = np.zeros(len(internal), np.bool_)
            if len(internal):
                mask = self.of(int(internal.max()) + 2)[internal] & (internal >= 0)
            few = np.flatnonzero(mask) if int(mask.sum()) <= FEW_ROWS else None
            # Of one model at a time: where two take turns, as in a trial, it is made anew.
            self._rows = kept = internal, SelectedRows(mask, few)
        return kept[1]


class FilterMasks:
    """Makes the masks of filters, and caches the masks that were used last.

    Args:
        cache_bytes: the memory for masks, in bytes.
    """

    def __init__(self, cache_bytes: int) -> None:
        self.cache: ByteCache[Hashable, FilterMask] = ByteCache(cache_bytes)
        self._flights: SingleFlight[Hashable, FilterMask] = SingleFlight()

    async def get(self, wanted: AttributeFilter, catalogue: Catalogue) -> FilterMask:
        """The mask of a filter in a state of the catalogue with loaded attributes.

        Raises:
            Unprocessable: the filter compares values of a kind that no item has.
        """
        key = (wanted.key, catalogue.attributes.state(wanted.names))
        mask = self.cache.get(key)
        if mask is not None:
            return mask

        # The attributes may be of a later state, with more items.
        size = max(catalogue.size, catalogue.attributes.size)

        def make() -> FilterMask:
            attributes = catalogue.attributes
            by_id = attributes.mask(wanted, size)
            return FilterMask(by_id, attributes.fits_without(wanted.condition))

        async def run() -> FilterMask:
            if catalogue.size <= MAX_INLINE_ITEMS:
                return make()
            return await asyncio.to_thread(make)

        mask = await self._flights.run(key, run)
        # By id and by row, and of as many rows as there are items.
        self.cache.put(key, mask, 2 * catalogue.size + 8 * FEW_ROWS + OVERHEAD_BYTES)
        return mask
