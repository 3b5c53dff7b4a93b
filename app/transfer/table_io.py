"""Rows of tables as JSON lines, and the ids that the database generates.

The database never generates an id twice, not even the id of a deleted row. The next id thus follows
from the database's own counter, not from the highest id in a table.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

CHUNK_ROWS = 5_000

Rows = list[list[Any]]
"""Rows as values in the order of some columns."""


def encode(table: sa.Table, rows: Sequence[Sequence[Any]]) -> bytes:
    """Encodes rows as lines of JSON arrays, with values in the order of the table's columns."""
    binary = _positions(table.c, sa.LargeBinary)
    values: Iterable[Sequence[Any]] = map(tuple, rows)
    if binary:
        values = (_convert(list(row), binary, _to_base64) for row in rows)
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in values)


def decode(columns: Sequence[sa.Column[Any]], lines: Iterable[bytes]) -> Iterator[Rows]:
    """Decodes rows, `CHUNK_ROWS` at a time; values of JSON columns stay text.

    Raises:
        ValueError: a line is not a row of these columns.
    """
    binary, json = _positions(columns, sa.LargeBinary), _positions(columns, sa.JSON)
    source = iter(lines)
    while chunk := list(islice(source, CHUNK_ROWS)):
        rows: Rows = [orjson.loads(line) for line in chunk]
        for row in rows:
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(f"not a row of {len(columns)} values")
            if json:
                _convert(row, json, _to_text)
            if binary:
                _convert(row, binary, _from_base64)
        yield rows


def _positions(
    columns: Iterable[sa.Column[Any]], kind: type[sa.types.TypeEngine[Any]]
) -> list[int]:
    return [index for index, column in enumerate(columns) if isinstance(column.type, kind)]


def _convert(row: list[Any], indices: Sequence[int], convert: Callable[[Any], Any]) -> list[Any]:
    for index in indices:
        if row[index] is not None:
            row[index] = convert(row[index])
    return row


def _to_text(value: Any) -> str:
    return orjson.dumps(value).decode()


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


async def last_id(conn: AsyncConnection, table: sa.Table) -> int | None:
    """The highest id that the database has generated for a table; None without generated ids."""
    column = table.autoincrement_column
    if column is None:
        return None
    highest = await _highest(conn, column)
    if conn.dialect.name == "postgresql":
        sequence = await _sequence(conn, column)
        if sequence is not None:
            row = (
                await conn.execute(sa.text(f"SELECT last_value, is_called FROM {sequence}"))  # noqa: S608
            ).one()
            return max(highest, int(row.last_value) if row.is_called else 0)
    elif _has_sqlite_sequence(table):
        seq = await conn.scalar(
            sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name}
        )
        return max(highest, int(seq or 0))
    return highest


async def continue_ids_after(conn: AsyncConnection, table: sa.Table, last: int | None) -> None:
    """Makes the database generate ids above ``last`` and above the ids in the table."""
    column = table.autoincrement_column
    if column is None:
        return
    highest = max(last or 0, await _highest(conn, column))
    if conn.dialect.name == "postgresql":
        sequence = await _sequence(conn, column)
        if sequence is not None:
            await conn.execute(
                sa.text("SELECT setval(CAST(:sequence AS regclass), :next, false)"),
                {"sequence": sequence, "next": highest + 1},
            )
    elif _has_sqlite_sequence(table):
        # This table has no key to upsert by, and no row if nothing was ever inserted.
        name = {"name": table.name}
        await conn.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), name)
        await conn.execute(
            sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"),
            {**name, "seq": highest},
        )


def _has_sqlite_sequence(table: sa.Table) -> bool:
    return bool(table.dialect_options["sqlite"]["autoincrement"])


async def _highest(conn: AsyncConnection, column: sa.Column[int]) -> int:
    return await conn.scalar(sa.select(sa.func.max(column))) or 0


async def _sequence(conn: AsyncConnection, column: sa.Column[int]) -> str | None:
    """The quoted name of the sequence behind a column."""
    name: str | None = await conn.scalar(
        sa.select(sa.func.pg_get_serial_sequence(column.table.name, column.name))
    )
    return name
