"""Immutable catalogue in memory, by internal item id, for filters and answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalog.attributes import Attributes
from app.catalog.availability import NEVER_ENDS, Availability, Window

_NO_IDS = np.zeros(0, np.int64)
MAX_COMPARED = 16  # rows of a change: more are taken for changes of what lists show


class CatalogueRow(NamedTuple):
    """The columns of an item that the catalogue holds."""

    id: int
    external_id: str
    title: str | None
    categories: list[str]
    hidden: bool
    deleted: bool
    seq: int
    attributes: str = "{}"
    """A JSON object, which is empty if attributes are not loaded."""
    available_from: int | None = None
    available_until: int | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A state of the catalogue. A change makes another instance."""

    seq: int = 0
    """The number of the latest change in this state."""
    external_ids: Sequence[str] = ()
    """The client's id by internal id; empty where no item exists."""
    titles: Sequence[str | None] = ()
    """The title by internal id."""
    visible: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(size,) whether the item may be recommended: neither hidden nor deleted, and available."""
    internal_ids: dict[str, int] = field(default_factory=dict)
    """The internal id by the client's id, deleted items included."""
    categories: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """The internal ids in each category, ascending; hidden items included, deleted ones not."""
    n_categories: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """(size,) the number of categories that an item is in."""
    deleted: frozenset[int] = frozenset()
    """Internal ids of deleted items."""
    shown: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """(size,) the number of each item's latest change that lists depend on."""
    shown_seq: int = 0
    """The highest number in ``shown``; part of cache keys."""
    attributes: Attributes = field(default_factory=Attributes)
    """The loaded attributes, for filters. A change of an attribute makes cached lists with a filter
    on the attribute stale."""
    listed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(size,) whether the item is neither hidden nor deleted, at any time."""
    availability: Availability = field(default_factory=Availability)
    moment: int = 0
    """The last time at which an item became available or unavailable, in microseconds since 1970;
    part of cache keys."""
    next_change: int = NEVER_ENDS
    """The next time at which an item becomes available or unavailable, in microseconds since 1970.
    This state ends at that time."""

    @property
    def size(self) -> int:
        """One more than the highest internal id: the length of the arrays."""
        return len(self.visible)

    def members(self, categories: Iterable[str]) -> list[NDArray[np.int64]]:
        """Return the internal ids in each of the categories; the arrays are shared."""
        return [self.categories.get(category, _NO_IDS) for category in categories]

    def mask(self, categories: Iterable[str]) -> NDArray[np.bool_]:
        """Return a mask (size,): whether the item is in any of the categories."""
        mask = np.zeros(self.size, np.bool_)
        for ids in self.members(categories):
            mask[ids] = True
        return mask

    def at(self, now: int) -> Catalogue:
        """Return the state at a time, in microseconds since 1970."""
        moment, next_change = (
            find(now) for find in (self.availability.last_change, self.availability.next_change)
        )
        if (moment, next_change) == (self.moment, self.next_change):
            return self
        return replace(
            self, visible=self._visible_at(moment), moment=moment, next_change=next_change
        )

    def _visible_at(self, moment: int) -> NDArray[np.bool_]:
        if not len(self.availability.ids):
            return self.listed
        visible = self.listed.copy()
        visible[self.availability.unavailable(moment)] = False
        return visible

    def updated(self, rows: Sequence[CatalogueRow]) -> Catalogue:
        """Return the state after these changes, in any order.

        A change that lists do not show, such as a change of an attribute, changes only ``seq`` and
        ``attributes``.
        """
        seq = max([self.seq, *(row.seq for row in rows)])
        attributes = self.attributes
        if rows:
            attributes = attributes.updated([(row.id, row.seq, row.attributes) for row in rows])
        rows = self.shown_rows(rows)
        if not rows:
            return self if seq == self.seq else replace(self, seq=seq, attributes=attributes)
        windows = [Window(row.id, row.available_from, row.available_until) for row in rows]
        size = max(self.size, max(row.id for row in rows) + 1)
        external_ids = [*self.external_ids, *([""] * (size - self.size))]
        titles = [*self.titles, *([None] * (size - self.size))]
        listed = np.zeros(size, np.bool_)
        listed[: self.size] = self.listed
        shown = np.zeros(size, np.int64)
        shown[: self.size] = self.shown
        n_categories = np.zeros(size, np.int32)
        n_categories[: self.size] = self.n_categories
        internal_ids = dict(self.internal_ids)
        deleted = set(self.deleted)
        members: dict[str, list[int]] = {}
        for row in rows:
            external_ids[row.id] = row.external_id
            titles[row.id] = row.title
            listed[row.id] = not (row.hidden or row.deleted)
            shown[row.id] = row.seq
            internal_ids[row.external_id] = row.id
            n_categories[row.id] = 0 if row.deleted else len(set(row.categories))
            if row.deleted:
                deleted.add(row.id)
            else:
                deleted.discard(row.id)
                for category in row.categories:
                    members.setdefault(category, []).append(row.id)
        # Only items of the earlier state can have left a category.
        changed = np.array([row.id for row in rows if row.id < self.size], np.int64)
        categories = {}
        for name in dict.fromkeys([*self.categories, *members]):
            ids = self.categories.get(name, _NO_IDS)
            if len(changed):
                ids = ids[~np.isin(ids, changed)]
            if name in members:
                ids = np.union1d(ids, np.array(members[name], np.int64))
            if len(ids):
                categories[name] = ids
        changed_state = Catalogue(
            seq=seq,
            external_ids=external_ids,
            titles=titles,
            visible=listed,
            internal_ids=internal_ids,
            categories=categories,
            n_categories=n_categories,
            deleted=frozenset(deleted),
            shown=shown,
            shown_seq=max([self.shown_seq, *(row.seq for row in rows)]),
            attributes=attributes,
            listed=listed,
            availability=self.availability.updated(windows),
            moment=self.moment,
            next_change=self.next_change,
        )
        return replace(changed_state, visible=changed_state._visible_at(self.moment))

    def shown_rows(self, rows: Sequence[CatalogueRow]) -> Sequence[CatalogueRow]:
        """The rows that lists may depend on; all rows, if they are more than ``MAX_COMPARED``."""
        return rows if len(rows) > MAX_COMPARED else [row for row in rows if self._is_shown(row)]

    def _is_shown(self, row: CatalogueRow) -> bool:
        """Return whether the row changes data that lists depend on."""
        if row.id >= self.size:
            return True
        now = (row.external_id, row.title, not (row.hidden or row.deleted), row.deleted)
        before = (self.external_ids[row.id], self.titles[row.id], bool(self.listed[row.id]))
        if now != (*before, row.id in self.deleted):
            return True
        window = Window(row.id, row.available_from, row.available_until)
        if self.availability.updated([window]) is not self.availability:
            return True
        named = set() if row.deleted else set(row.categories)
        return len(named) != self.n_categories[row.id] or not all(
            _has(self.categories.get(name, _NO_IDS), row.id) for name in named
        )


def _has(ids: NDArray[np.int64], wanted: int) -> bool:
    """Return whether ascending ids contain an id."""
    position = int(ids.searchsorted(wanted))
    return position < len(ids) and int(ids[position]) == wanted
