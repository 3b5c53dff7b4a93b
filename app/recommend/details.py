"""Details of items that answers show on request: categories and attributes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from app.catalog.service import CatalogService
from app.recommend.response import RankedList


class ItemDetails:
    """Reads the details of a list's items, with one query a list.

    Lists in the caches stay without details.
    """

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog

    async def of(self, ids: Collection[int], include: Sequence[str]) -> dict[int, dict[str, Any]]:
        """The details by internal id; empty details for −1 and for deleted items."""
        items = await self._catalog.described({item for item in ids if item >= 0})
        empty: dict[str, Any] = {"categories": [], "attributes": {}}
        return {
            item: {
                name: getattr(items[item], name) if item in items else empty[name]
                for name in include
            }
            for item in ids
        }

    async def added(self, ranked: RankedList, include: Sequence[str]) -> RankedList:
        """The list with the details of its items; the same list where ``include`` is empty."""
        if not include or not ranked.ids:
            return ranked
        details = await self.of(ranked.ids, include)
        entries = [
            entry | details[item] for entry, item in zip(ranked.entries(), ranked.ids, strict=True)
        ]
        return RankedList.of(entries, ranked.ids)
