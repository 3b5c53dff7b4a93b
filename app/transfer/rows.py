"""Rows of any table: as lines of JSON, and as values for the driver."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson
import sqlalchemy as sa

CHUNK = 5_000

Rows = list[list[Any]]
"""Values in the order of some columns."""


def encode(table: sa.Table, rows: Sequence[Sequence[Any]]) -> bytes:
    """Lines of JSON arrays, each a row with its values in the order of the table's columns."""
    binary = _places(table.c, sa.LargeBinary)
    values: Iterable[Sequence[Any]] = map(tuple, rows)
    if binary:
        values = (_changed(list(row), binary, _to_base64) for row in rows)
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in values)


def decode(columns: Sequence[sa.Column[Any]], lines: Iterable[bytes]) -> Iterator[Rows]:
    """Rows of plain values, JSON as text, some thousand at a time.

    Raises ValueError for a line that is not a row of these columns.
    """
    binary, json = _places(columns, sa.LargeBinary), _places(columns, sa.JSON)
    source = iter(lines)
    while chunk := list(islice(source, CHUNK)):
        rows: Rows = [orjson.loads(line) for line in chunk]
        for row in rows:
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(f"not a row of {len(columns)} values")
            if json:
                _changed(row, json, _to_text)
            if binary:
                _changed(row, binary, _from_base64)
        yield rows


def _places(columns: Iterable[sa.Column[Any]], kind: type[sa.types.TypeEngine[Any]]) -> list[int]:
    return [at for at, column in enumerate(columns) if isinstance(column.type, kind)]


def _changed(row: list[Any], places: Sequence[int], change: Callable[[Any], Any]) -> list[Any]:
    for at in places:
        if row[at] is not None:
            row[at] = change(row[at])
    return row


def _to_text(value: Any) -> str:
    return orjson.dumps(value).decode()


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
