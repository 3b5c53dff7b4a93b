"""JSON Lines: an object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ncr_core.data.readers.columns import Names, interaction_names
from ncr_core.data.readers.lines import Block, read_blocks
from ncr_core.data.readers.rows import (
    BadRow,
    Columns,
    InteractionRow,
    OnBad,
    OnBytes,
    RowFault,
    as_latest,
    id_of,
    latest_of,
    position_of,
    rating_of,
    shown,
    timestamp_of,
    type_of,
)
from ncr_core.errors import DataError

_LOOKED_AT = 100


@dataclass(frozen=True)
class JsonLinesFile:
    """Interactions in JSON Lines."""

    path: Path
    names: Names

    def blocks(self, on_bad: OnBad, on_bytes: OnBytes | None) -> Iterator[list[InteractionRow]]:
        """Yield the rows, some thousand at a time."""
        for records in read_objects(self.path, on_bad=on_bad, on_bytes=on_bytes):
            rows: list[InteractionRow] = []
            for number, record in records:
                try:
                    rows.append(typed_row(record, self.names))
                except RowFault as fault:
                    on_bad(BadRow(self.path.name, number, str(fault)))
            yield rows


def open_jsonl(path: Path, columns: Columns) -> JsonLinesFile:
    """Find the columns in a file's first objects.

    Raises:
        DataError: it is empty, has no objects, or lacks a column.
    """
    return JsonLinesFile(path, interaction_names(columns, keys_of(path), path.name))


def keys_of(path: Path) -> list[str]:
    """The keys that the first objects of a file have, in the order of their coming.

    Raises:
        DataError: there is no object among the first lines.
    """
    reasons: list[BadRow] = []
    keys: dict[str, None] = {}
    seen = 0
    for records in read_objects(path, on_bad=reasons.append):
        for _, record in islice(records, _LOOKED_AT):
            keys.update(dict.fromkeys(record))
            seen += 1
        if seen or reasons:
            break
    if seen:
        return list(keys)
    if reasons:
        raise DataError(
            f"{path.name} is not JSON Lines: line {reasons[0].line}: {reasons[0].reason}"
        )
    raise DataError(f"{path.name} is empty")


def read_objects(
    path: Path, *, on_bad: OnBad, on_bytes: OnBytes | None = None
) -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
    """Yield a file's objects with their line numbers, block by block; blank lines are none."""
    for block in read_blocks(path, on_bytes=on_bytes):
        yield _objects(path.name, block, on_bad)


def typed_row(record: dict[str, Any], names: Names) -> InteractionRow:
    """A row from typed cells, or `RowFault`."""
    get = record.get
    position = position_of(get(names.position)) if names.position else None
    if names.latest and latest_of(get(names.latest)):
        position = as_latest(position)
    return InteractionRow(
        id_of("user", get(names.user)),
        id_of("item", get(names.item)),
        rating_of(get(names.rating)) if names.rating else None,
        timestamp_of(get(names.timestamp)) if names.timestamp else None,
        position,
        type_of(get(names.type)) if names.type else None,
    )


def _objects(file: str, block: Block, on_bad: OnBad) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(block.lines, block.first):
        try:
            if fault := block.faults.get(number):
                raise RowFault(fault)
            if text and not text.isspace():
                yield number, _object(text)
        except RowFault as fault:
            on_bad(BadRow(file, number, str(fault)))


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowFault(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise RowFault(f"not JSON that can be read: {shown(str(error))}") from None
    if not isinstance(record, dict):
        raise RowFault(f"not a JSON object: {shown(text)}")
    return record
