"""Bulk statements: many rows or values in one parameter, on SQLite and on PostgreSQL.

On PostgreSQL the parameter is JSON. The driver would build arrays value by value in Python, which
for events took several times as long as all other work. COPY sends ``MIN_COPY_ROWS`` rows and more,
and Arrow columns of any length.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import psycopg
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

if TYPE_CHECKING:
    import pyarrow as pa

MIN_COPY_ROWS = 2_000
"""From this number of rows on, COPY is faster by about a fifth. Below, the times are equal."""
_BINARY = {"int64": ">i8", "double": ">f8"}
_BINARY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_BINARY_TRAILER = b"\xff\xff"


def one_of(
    column: sa.ColumnElement[Any], values: Iterable[Any], dialect: str
) -> sa.ColumnElement[bool]:
    """The condition `column IN values` with one parameter, for any number of values.

    Neither database accepts tens of thousands of parameters. Each number of parameters would also
    be another statement to compile.
    """
    json_values = sa.literal(orjson.dumps(list(values)).decode(), sa.Text)
    if dialect == "sqlite":
        each = sa.func.json_each(json_values).table_valued("value")
        return column.in_(sa.select(each.c.value))
    sql_type = sa.BigInteger() if isinstance(column.type, sa.Integer) else sa.Text()
    texts = sa.func.jsonb_array_elements_text(sa.cast(json_values, JSONB_TEXT)).column_valued()
    # An array, not a subquery: the planner then uses the index.
    array = sa.func.array(
        sa.select(sa.cast(texts, sql_type)).scalar_subquery(), type_=ARRAY(sql_type)
    )
    return column == sa.any_(array)


def each_of(parameter: sa.BindParameter[str], dialect: str) -> sa.TableValuedAlias:
    """A table with the texts of a JSON list as its column ``value``."""
    if dialect == "sqlite":
        return sa.func.json_each(parameter).table_valued("value")
    texts = sa.func.jsonb_array_elements_text(sa.cast(parameter, JSONB_TEXT))
    return texts.table_valued("value").render_derived()


def begins_with(column: sa.ColumnElement[str], prefix: str, dialect: str) -> sa.ColumnElement[bool]:
    """The condition that an id begins with a prefix, in the form that an index serves.

    SQLite's LIKE ignores case, so the condition there is a range. An id has at most 256 bytes,
    which hold the highest character 64 times.
    """
    if dialect == "sqlite":
        return column.between(prefix, prefix + "\U0010ffff" * 64)
    return column.startswith(prefix, autoescape=True)


class _JsonbText(sa.types.UserDefinedType[str]):
    """A jsonb parameter whose value is already serialised."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "jsonb"


JSONB_TEXT = _JsonbText()


def _sql_type(column: sa.Column[Any]) -> str:
    if isinstance(column.type, sa.Boolean):
        return "boolean"
    if isinstance(column.type, sa.Integer):
        return "bigint"
    if isinstance(column.type, sa.Float):
        return "double precision"
    # Bytes are sent as text, see `_selected`.
    return "text"


def _selected(column: sa.Column[Any]) -> str:
    """The SQL expression for a column's value in a JSON record."""
    if isinstance(column.type, sa.JSON):
        return f"v.{column.name}::jsonb"
    if isinstance(column.type, sa.LargeBinary):
        return f"decode(v.{column.name}, 'base64')"
    return f"v.{column.name}"


async def insert_many(
    conn: AsyncConnection,
    table: sa.Table,
    columns: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    *,
    on_conflict: str = "",
) -> None:
    """Insert rows of plain values.

    The function bypasses SQLAlchemy's insert. For many rows SQLAlchemy spends more time on
    parameters than the database spends on rows.

    Args:
        conn: a connection in a transaction.
        table: the table to insert into.
        columns: the names of the columns.
        rows: a value for each column; JSON as text, binary columns as bytes.
        on_conflict: SQL that follows the values.
    """
    if not rows:
        return
    if conn.dialect.name == "postgresql" and len(rows) >= MIN_COPY_ROWS and not on_conflict:
        await _copy(conn, table, columns, rows)
        return
    names = ", ".join(columns)
    if conn.dialect.name == "sqlite":
        marks = ", ".join("?" * len(columns))
        await conn.exec_driver_sql(
            f"INSERT INTO {table.name} ({names}) VALUES ({marks}) {on_conflict}",  # noqa: S608
            list(rows),
        )
        return
    record_type = ", ".join(f"{name} {_sql_type(table.c[name])}" for name in columns)
    selected = ", ".join(_selected(table.c[name]) for name in columns)
    await conn.exec_driver_sql(
        f"INSERT INTO {table.name} ({names}) "  # noqa: S608
        f"SELECT {selected} FROM json_to_recordset(%s::json) AS v({record_type}) {on_conflict}",
        (_records(columns, rows),),
    )


async def insert_columns(
    conn: AsyncConnection, table: sa.Table, columns: Mapping[str, pa.Array]
) -> None:
    """Insert tens of thousands of rows from Arrow columns of text, `int64` or `float64`."""
    if conn.dialect.name == "postgresql":
        await _copy(conn, table, list(columns), _binary_rows(list(columns.values())))
    else:
        cells = (column.to_pylist() for column in columns.values())
        await insert_many(conn, table, list(columns), list(zip(*cells, strict=True)))


def _binary_rows(columns: Sequence[pa.Array]) -> memoryview:
    """The rows in COPY's binary format: each value follows its length in bytes.

    Arrow joins the values of each row, so that no value becomes a Python object.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def fixed(values: np.ndarray[Any, Any]) -> pa.Array:
        kind = pa.binary(values.dtype.itemsize)
        data = pa.py_buffer(np.ascontiguousarray(values))
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, data]).cast(
            pa.binary()
        )

    parts: list[pa.Array | pa.Scalar] = [pa.scalar(struct.pack(">h", len(columns)), pa.binary())]
    for column in columns:
        if pa.types.is_string(column.type):
            sizes = pc.fill_null(pc.binary_length(column), -1).to_numpy(zero_copy_only=False)
            parts += [fixed(sizes.astype(">i4")), pc.fill_null(column.cast(pa.binary()), b"")]
            continue
        values = np.empty(len(column), [("size", ">i4"), ("value", _BINARY[str(column.type)])])
        values["size"] = 8
        values["value"] = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
        part = fixed(values)
        if column.null_count:
            part = pc.if_else(column.is_null(), pa.scalar(struct.pack(">i", -1), pa.binary()), part)
        parts.append(part)
    return memoryview(pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary())).buffers()[2])


async def _copy(
    conn: AsyncConnection,
    table: sa.Table,
    columns: Sequence[str],
    rows: Sequence[tuple[Any, ...]] | memoryview,
) -> None:
    """Insert rows by COPY, in the caller's transaction.

    The driver sends rows of values as escaped text. A ``memoryview`` is a result of `_binary_rows`.
    """
    driver = (await conn.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)  # noqa: S101 - there is only this driver
    is_binary = isinstance(rows, memoryview)
    statement = sql.SQL("COPY {} ({}) FROM STDIN" + " (FORMAT binary)" * is_binary).format(
        sql.Identifier(table.name), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    try:
        async with driver.cursor() as cursor, cursor.copy(statement) as copy:
            if isinstance(rows, memoryview):
                for part in (_BINARY_HEADER, rows, _BINARY_TRAILER):
                    await copy.write(part)
            else:
                for row in rows:
                    await copy.write_row(row)
    except psycopg.Error as error:
        # As SQLAlchemy reports errors of its own statements, for the same error handling.
        if driver.closed:
            await conn.invalidate(error)
        raise DBAPIError.instance(
            statement.as_string(None),
            None,
            error,
            psycopg.Error,
            hide_parameters=True,
            connection_invalidated=driver.closed,
        ) from error


async def update_many(
    conn: AsyncConnection, table: sa.Table, column: str, values: Sequence[tuple[int, int]]
) -> None:
    """Set one integer column for each `(value, id)`."""
    if not values:
        return
    if conn.dialect.name == "sqlite":
        await conn.exec_driver_sql(
            f"UPDATE {table.name} SET {column} = ? WHERE id = ?",  # noqa: S608
            list(values),
        )
        return
    await conn.exec_driver_sql(
        f"UPDATE {table.name} SET {column} = v.value "  # noqa: S608
        "FROM json_to_recordset(%s::json) AS v(value bigint, id bigint) "
        f"WHERE {table.name}.id = v.id",
        (_records(("value", "id"), values),),
    )


def _records(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    return orjson.dumps(records, default=_base64).decode()


def _base64(value: Any) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is not stored by many rows")
    return base64.b64encode(value).decode()
