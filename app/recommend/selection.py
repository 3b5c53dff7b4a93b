"""The items that a list's filter leaves, and the list's boosts: one lookup for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalog.masks import MAX_INLINE_ITEMS, FilterMask, SelectedRows
from app.catalog.service import CatalogService
from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache
from app.recommend.schemas import RecommendationQuery

BOOST_BYTES = 2**26  # for what boosts come to, by item

Floats = NDArray[np.float64]


class ItemBoosts:
    """The additions of boosts to the log-odds that a user prefers each item to others."""

    def __init__(self, parts: Sequence[tuple[FilterMask, float]]) -> None:
        self._parts = parts
        self._rows: tuple[NDArray[np.int64], float, Floats] | None = None

    def of(self, size: int) -> Floats:
        """(size,) log-odds by internal id."""
        total = np.zeros(size)
        for mask, by in self._parts:
            total[mask.of(size)] += by
        return total

    def at(self, ids: NDArray[np.int64], size: int) -> Floats:
        """The log-odds of internal ids; −1 is an unknown item, which has no attributes."""
        total = np.zeros(len(ids))
        for mask, by in self._parts:
            total[mask.of(size + 1)[np.where(ids < 0, size, ids)]] += by
        return total

    def has_rows(self, internal: NDArray[np.int64], temperature: float) -> bool:
        """Whether the result of `rows` for the same model is at hand."""
        kept = self._rows
        return kept is not None and kept[0] is internal and kept[1] == temperature

    def rows(self, internal: NDArray[np.int64], temperature: float) -> Floats:
        """(n_items,) the additions to the scores of a model's rows, on the scale of margins.

        A margin is 2T times the log-odds. While the model stays, so does the array, because one
        pass ranks the requests that share an array.
        """
        kept = self._rows
        if kept is None or kept[0] is not internal or kept[1] != temperature:
            total = np.zeros(len(internal))
            for mask, by in self._parts:
                total[mask.rows(internal).mask] += by
            self._rows = kept = internal, temperature, total * (2.0 * temperature)
        return kept[2]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A query's filter and boosts, looked up in a state of the catalogue."""

    mask: FilterMask | None
    """None: all items."""
    boosts: ItemBoosts | None
    """None: the query has no boosts."""
    state: Hashable
    """The key of the filter and the boosts."""

    def allowed(self, size: int) -> NDArray[np.bool_] | None:
        """(size,) by internal id: whether the filter leaves an item; None for all items.

        Callers do not write to the array.
        """
        return None if self.mask is None else self.mask.of(size)

    def rows(self, internal: NDArray[np.int64]) -> SelectedRows | None:
        """The rows of a model that the filter leaves, as `FilterMask.rows`; None for all."""
        return None if self.mask is None else self.mask.rows(internal)

    def boost(self, internal: NDArray[np.int64], temperature: float) -> Floats | None:
        """The additions to a model's rows, as `ItemBoosts.rows`; None without boosts."""
        return None if self.boosts is None else self.boosts.rows(internal, temperature)

    def fitting(self, ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """The positions of the internal ids that the filter leaves; −1 is an unknown item."""
        if self.mask is None:
            return np.arange(len(ids))
        # Behind the last id there is none: what an item without attributes gets.
        return np.flatnonzero(self.mask.of(size + 1)[np.where(ids < 0, size, ids)])

    async def prepare(self, internal: NDArray[np.int64], temperature: float) -> None:
        """Prepares the rows of a model; ``internal`` (n_items,) are the ids of its rows.

        With more than ``MAX_INLINE_ITEMS`` items, a thread prepares the rows.
        """
        mask, boosts = self.mask, self.boosts
        if (mask is None or mask.has_rows(internal)) and (
            boosts is None or boosts.has_rows(internal, temperature)
        ):
            return

        def make() -> None:
            self.rows(internal)
            self.boost(internal, temperature)

        if len(internal) <= MAX_INLINE_ITEMS:
            make()
        else:
            await asyncio.to_thread(make)


class Selector:
    """Looks up the filters and boosts of queries."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog
        self._boosts: ByteCache[Hashable, ItemBoosts] = ByteCache(BOOST_BYTES)

    async def select(self, catalogue: Catalogue, query: RecommendationQuery) -> Selection | None:
        """The selection of a query; None where the query has neither a filter nor a boost.

        Raises:
            Unprocessable: a filter compares values of a kind that no item has.
            Unavailable: attributes that a filter names are still being read.
        """
        wanted = query.filter
        if wanted is None and not query.boost:
            return None
        filters = [*([wanted] if wanted else []), *(one.filter for one in query.boost)]
        names = {name for each in filters for name in each.names}
        catalogue = await self._catalog.with_attributes(catalogue, names)
        state, mask, boosts = catalogue.attributes.state, None, None
        filter_state: Hashable = None
        if wanted is not None:
            mask = await self._catalog.mask(wanted, catalogue)
            filter_state = (wanted.key, state(wanted.names))
        boost_state = tuple(
            (one.filter.key, state(one.filter.names), one.by) for one in query.boost
        )
        if query.boost:
            boosts = self._boosts.get(boost_state)
            if boosts is None:
                boosts = ItemBoosts(
                    [
                        (await self._catalog.mask(one.filter, catalogue), one.by)
                        for one in query.boost
                    ]
                )
                size = catalogue.size * (8 + 2 * len(query.boost))
                self._boosts.put(boost_state, boosts, size)
        return Selection(mask, boosts, (filter_state, boost_state))
