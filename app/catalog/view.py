"""The catalogue in memory, by internal id: what filters and answers are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CatalogueRow(NamedTuple):
    """The part of an item that the view holds."""

    id: int
    external_id: str
    title: str | None
    categories: list[str]
    hidden: bool
    deleted: bool
    seq: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """An immutable state of the catalogue. A change makes another one and leaves this as it is."""

    seq: int = 0
    """The catalogue's number that it takes in; goes into the key of what is cached."""
    external_ids: Sequence[str] = ()
    """The client's id by internal id; empty where there is no such item."""
    titles: Sequence[str | None] = ()
    """The title by internal id."""
    visible: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """By internal id: whether it may be recommended."""
    internal_ids: dict[str, int] = field(default_factory=dict)
    """The internal id by the client's id, deleted items included."""
    categories: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """The internal ids in each category, ascending; hidden items included, deleted ones not."""
    deleted: frozenset[int] = frozenset()
    """Internal ids of deleted items."""

    @property
    def size(self) -> int:
        """One more than the highest internal id: the length of the arrays."""
        return len(self.visible)

    def mask(self, categories: Iterable[str]) -> NDArray[np.bool_]:
        """By internal id: whether the item is in any of the categories."""
        mask = np.zeros(self.size, np.bool_)
        for category in categories:
            mask[self.categories.get(category, _NOTHING)] = True
        return mask

    def updated(self, rows: Sequence[CatalogueRow]) -> Catalogue:
        """The state after these changes. Their order does not matter."""
        if not rows:
            return self
        size = max(self.size, max(row.id for row in rows) + 1)
        external_ids = [*self.external_ids, *([""] * (size - self.size))]
        titles = [*self.titles, *([None] * (size - self.size))]
        visible = np.zeros(size, np.bool_)
        visible[: self.size] = self.visible
        internal_ids = dict(self.internal_ids)
        deleted = set(self.deleted)
        added: dict[str, list[int]] = {}
        for row in rows:
            external_ids[row.id] = row.external_id
            titles[row.id] = row.title
            visible[row.id] = not (row.hidden or row.deleted)
            internal_ids[row.external_id] = row.id
            if row.deleted:
                deleted.add(row.id)
            else:
                deleted.discard(row.id)
                for category in row.categories:
                    added.setdefault(category, []).append(row.id)
        # Only items that were there already can have left a category.
        changed = np.array([row.id for row in rows if row.id < self.size], np.int64)
        categories = {
            name: kept
            for name, ids in self.categories.items()
            if len(kept := ids[~np.isin(ids, changed)] if len(changed) else ids) or name in added
        }
        for name, new in added.items():
            both = np.concatenate([categories.get(name, _NOTHING), np.array(new, np.int64)])
            categories[name] = np.unique(both)
        return Catalogue(
            seq=max(self.seq, max(row.seq for row in rows)),
            external_ids=external_ids,
            titles=titles,
            visible=visible,
            internal_ids=internal_ids,
            categories=categories,
            deleted=frozenset(deleted),
        )


_NOTHING = np.zeros(0, np.int64)
