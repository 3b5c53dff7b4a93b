"""Which of a file's columns is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ncr_core.data.readers.rows import Columns
from ncr_core.errors import DataError

# What widely used files call them. Only for a name the caller has left at its default.
_ALSO = {
    "user": ("userId", "user_id"),
    "item": ("movieId", "itemId", "item_id"),
    "rating": ("value",),
}
_TITLES = ("title", "name")
_CATEGORIES = ("categories", "genres", "category")


@dataclass(frozen=True)
class Names:
    """The columns of one file of interactions, by the names they have there."""

    user: str
    item: str
    rating: str | None
    timestamp: str | None
    position: str | None
    latest: str | None
    type: str | None

    def present(self) -> list[str]:
        """Every name that the file has, each once."""
        names = (getattr(self, part.name) for part in fields(self))
        return list(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True)
class ItemNames:
    """The columns of one file of items; every other column is an attribute."""

    item: str
    title: str | None
    categories: str | None


def interaction_names(columns: Columns, found: Sequence[str], file: str) -> Names:
    """Find the columns of a file of interactions.

    Raises:
        DataError: the user, the item, or a column that the caller named is not there.
    """
    chosen = {part.name: _find(columns, part.name, found, file) for part in fields(Columns)}
    user, item = chosen.pop("user"), chosen.pop("item")
    if user is None or item is None:
        raise _missing(file, "user" if user is None else "item", columns, found)
    return Names(user=user, item=item, **chosen)


def item_names(columns: Columns, found: Sequence[str], file: str) -> ItemNames:
    """Find the columns of a file of items.

    Raises:
        DataError: there is no column for the item.
    """
    item = _find(columns, "item", found, file)
    if item is None:
        raise _missing(file, "item", columns, found)
    return ItemNames(
        item=item,
        title=next((name for name in _TITLES if name in found), None),
        categories=next((name for name in _CATEGORIES if name in found), None),
    )


def _find(columns: Columns, part: str, found: Sequence[str], file: str) -> str | None:
    wanted: str = getattr(columns, part)
    if wanted in found:
        return wanted
    if wanted != getattr(Columns, part):  # asked for by name: silence would lose a column
        raise _missing(file, part, columns, found)
    return next((name for name in _ALSO.get(part, ()) if name in found), None)


def _missing(file: str, part: str, columns: Columns, found: Sequence[str]) -> DataError:
    listed = ", ".join(ascii(name[:40])[1:-1] for name in found[:20]) or "none"
    more = ", …" if len(found) > 20 else ""
    return DataError(
        f'{file} has no column "{getattr(columns, part)}" (found: {listed}{more}); '
        f"name the column that holds the {part} with the columns option"
    )
