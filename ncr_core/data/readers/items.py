"""Items from tables and from MovieLens's own files: an id, a title, categories and attributes.

MovieLens's titles are Latin-1 in the older sets and UTF-8 in the later ones (10M has the older
format with UTF-8), so the readers try UTF-8 first for each line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from ncr_core.data.readers.rows import (
    BadRow,
    Columns,
    ItemRow,
    OnBad,
    RowFault,
    check_id,
    check_text,
    converted,
    id_of,
    shown,
)
from ncr_core.data.readers.tables import (
    TypedRecord,
    column_names,
    item_column,
    read_typed,
)
from ncr_core.data.readers.text import Record, read_header, read_records

TableKind = Literal["csv", "jsonl", "parquet"]
NO_CATEGORY = "(no genres listed)"
"""The text of MovieLens for a film without genres."""
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
"""The genres of the flags of `u.item`, unless a `u.genre` beside that file gives others."""
_FIELDS_BEFORE_GENRES = 5
_TITLES = ("title", "name")
_CATEGORIES = ("categories", "genres", "category")


@dataclass(frozen=True)
class ItemNames:
    """The columns of one file of items; every other column is an attribute."""

    item: str
    title: str | None
    categories: str | None


@dataclass(frozen=True)
class ItemTable:
    """A CSV, JSON Lines or Parquet file of items."""

    path: Path
    kind: TableKind
    names: ItemNames
    delimiter: str = ","
    header: tuple[str, ...] = ()

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        for records in self._records(on_bad):
            yield from converted(self.path.name, records, self._item, on_bad)

    def _records(self, on_bad: OnBad) -> Iterator[Iterable[TypedRecord]]:
        if self.kind == "csv":
            for records in read_records(
                self.path, self.delimiter, quoted=True, header=True, on_bad=on_bad
            ):
                yield self._named(records, on_bad)
        else:
            yield from read_typed(self.path, self.kind, on_bad=on_bad)

    def _named(self, records: Iterable[Record], on_bad: OnBad) -> Iterator[TypedRecord]:
        for number, fields in records:
            if len(fields) == len(self.header):
                yield number, dict(zip(self.header, fields, strict=True))
            else:
                reason = f"{len(fields)} fields instead of {len(self.header)}"
                on_bad(BadRow(self.path.name, number, reason))

    def _item(self, record: dict[str, Any]) -> ItemRow:
        names = self.names
        item = id_of("item", record.pop(names.item, None))
        title = record.pop(names.title, None) if names.title else None
        if not isinstance(title, str | None):
            raise RowFault(f"the title is not text: {shown(title)}")
        categories = record.pop(names.categories, None) if names.categories else None
        return ItemRow(
            item=item,
            title=check_text("title", title) if title else None,
            categories=categories_of(categories),
            attributes={
                check_text("attribute's name", name): _plain(name, value)
                for name, value in record.items()
                if name and value is not None and value != ""
            },
        )


def open_items(path: Path, kind: TableKind, columns: Columns) -> ItemTable:
    """Find the columns of a file of items.

    Raises DataError if the file is empty, unreadable, or has no column for the item.
    """
    if kind != "csv":
        return ItemTable(path, kind, _item_names(columns, column_names(path, kind), path.name))
    delimiter, header, names = read_header(
        path, lambda found: _item_names(columns, found, path.name)
    )
    return ItemTable(path, kind, names, delimiter, tuple(header))


def _item_names(columns: Columns, found: Sequence[str], file: str) -> ItemNames:
    return ItemNames(
        item=item_column(columns, found, file),
        title=next((name for name in _TITLES if name in found), None),
        categories=next((name for name in _CATEGORIES if name in found), None),
    )


@dataclass(frozen=True)
class MoviesDat:
    """`movies.dat`: MovieID::Title::Genre|Genre."""

    path: Path

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        return converted(self.path.name, _records(self.path, "::", on_bad), self._row, on_bad)

    def _row(self, fields: list[str]) -> ItemRow:
        if len(fields) < 3:
            raise RowFault(f"{len(fields)} fields instead of 3")
        # A title may have the separator in it; the first and last field may not.
        return _film(fields[0], "::".join(fields[1:-1]), categories_of(fields[-1]), {})


@dataclass(frozen=True)
class UItem:
    """`u.item`: id|title|release date|video date|address|a flag a genre."""

    path: Path
    genres: tuple[str, ...]

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        return converted(self.path.name, _records(self.path, "|", on_bad), self._row, on_bad)

    def _row(self, fields: list[str]) -> ItemRow:
        width = _FIELDS_BEFORE_GENRES + len(self.genres)
        if len(fields) != width:
            raise RowFault(f"{len(fields)} fields instead of {width}")
        flags = zip(self.genres, fields[_FIELDS_BEFORE_GENRES:], strict=True)
        genres = tuple(genre for genre, flag in flags if flag == "1" and genre != "unknown")
        further = {"release_date": fields[2], "imdb_url": fields[4]}
        return _film(fields[0], fields[1], genres, further)


def open_u_item(path: Path) -> UItem:
    """Read the names of the genres, if `u.genre` is beside the file.

    Raises DataError if `u.genre` cannot be read.
    """
    for beside in (path.with_name("u.genre"), path.with_name("u.genre.gz")):
        if beside.is_file():
            numbered: dict[int, str] = {}
            for _, fields in _records(beside, "|", lambda _: None):
                if len(fields) == 2 and fields[1].strip().isdecimal():
                    numbered[int(fields[1])] = fields[0]
            if numbered and sorted(numbered) == list(range(len(numbered))):
                return UItem(path, tuple(numbered[at] for at in range(len(numbered))))
    return UItem(path, GENRES)


def categories_of(value: object) -> tuple[str, ...]:
    """Categories from a list, or from text that separates them by `|`; each once."""
    if value is None:
        return ()
    parts = value.split("|") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise RowFault(f"the categories are neither text nor a list: {shown(value)}")
    kept: dict[str, None] = {}
    for part in parts:
        if not isinstance(part, str):
            raise RowFault(f"a category is not text: {shown(part)}")
        name = check_text("category", part.strip())
        if name and name != NO_CATEGORY:
            kept[name] = None
    return tuple(kept)


def _plain(name: str, value: object) -> Any:
    """A value that JSON and a database's JSON column can hold."""
    if isinstance(value, str):
        return check_text(name, value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float | Decimal):
        if math.isfinite(value):
            return float(value)
        raise RowFault(f"{shown(name)} is not finite: {value}")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if isinstance(value, dict):
        return {check_text(name, str(key)): _plain(name, part) for key, part in value.items()}
    raise RowFault(f"{shown(name)} is of a kind that cannot be kept: {type(value).__name__}")


def _records(path: Path, delimiter: str, on_bad: OnBad) -> Iterator[tuple[int, list[str]]]:
    for records in read_records(
        path, delimiter, quoted=False, header=False, on_bad=on_bad, latin1=True
    ):
        yield from records


def _film(item: str, title: str, categories: tuple[str, ...], further: dict[str, str]) -> ItemRow:
    return ItemRow(
        item=check_id("item", item),
        title=check_text("title", title) or None,
        categories=categories,
        attributes={name: check_text(name, value) for name, value in further.items() if value},
    )
