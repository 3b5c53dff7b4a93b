"""Items from tables: an id, a title, categories, and whatever else there is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from ncr_core.data.readers.columns import ItemNames, item_names
from ncr_core.data.readers.delimited import Record, read_header, read_records
from ncr_core.data.readers.jsonlines import keys_of, read_objects
from ncr_core.data.readers.parquet import columns_of, read_rows
from ncr_core.data.readers.rows import (
    BadRow,
    Columns,
    ItemRow,
    OnBad,
    RowFault,
    check_text,
    id_of,
    shown,
)

NO_CATEGORY = "(no genres listed)"
"""What MovieLens writes where a film has none."""


@dataclass(frozen=True)
class ItemTable:
    """A CSV, JSON Lines or Parquet file of items."""

    path: Path
    kind: str
    names: ItemNames
    delimiter: str = ","
    header: tuple[str, ...] = ()

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        for records in self._records(on_bad):
            for number, record in records:
                try:
                    yield self._item(record)
                except RowFault as fault:
                    on_bad(BadRow(self.path.name, number, str(fault)))

    def _records(self, on_bad: OnBad) -> Iterator[Iterable[tuple[int, dict[str, Any]]]]:
        if self.kind == "jsonl":
            yield from read_objects(self.path, on_bad=on_bad)
        elif self.kind == "parquet":
            yield from read_rows(self.path, None, on_bad=on_bad)
        else:
            for records in read_records(
                self.path, self.delimiter, quoted=True, header=True, on_bad=on_bad
            ):
                yield self._named(records, on_bad)

    def _named(
        self, records: Iterable[Record], on_bad: OnBad
    ) -> Iterator[tuple[int, dict[str, Any]]]:
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


def open_items(path: Path, kind: str, columns: Columns) -> ItemTable:
    """Find the columns of a file of items.

    Raises:
        DataError: it is empty, unreadable, or has no column for the item.
    """
    if kind == "jsonl":
        return ItemTable(path, kind, item_names(columns, keys_of(path), path.name))
    if kind == "parquet":
        return ItemTable(path, kind, item_names(columns, columns_of(path), path.name))
    delimiter, header, names = read_header(
        path, lambda found: item_names(columns, found, path.name)
    )
    return ItemTable(path, kind, names, delimiter, tuple(header))


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
    """A value that JSON can hold, and a database's JSON column too."""
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
