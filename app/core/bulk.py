"""Many rows or values in one statement with one parameter, on SQLite and on PostgreSQL.

On PostgreSQL they travel as JSON: the driver builds arrays value by value in Python, which for
events took several times as long as all else. From some thousands on, rows travel by COPY.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import psycopg
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

COPY_ROWS = 2_000
"""From so many rows on COPY is the faster way, by about a fifth; below there is no difference."""


def one_of(
    column: sa.ColumnElement[Any], values: Iterable[Any], dialect: str
) -> sa.ColumnElement[bool]:
    """`column IN values` with one parameter, however many values there are.

    Neither database takes tens of thousands of parameters, and each count of them would be
    another statement to compile.
    """
    packed = sa.literal(orjson.dumps(list(values)).decode(), sa.Text)
    if dialect == "sqlite":
        each = sa.func.json_each(packed).table_valued("value")
        return column.in_(sa.select(each.c.value))
    kind = sa.BigInteger() if isinstance(column.type, sa.Integer) else sa.Text()
    texts = sa.func.jsonb_array_elements_text(sa.cast(packed, JSONB_TEXT)).column_valued()
    # An array, not a subquery: the planner then goes through the index.
    array = sa.func.array(sa.select(sa.cast(texts, kind)).scalar_subquery(), type_=ARRAY(kind))
    return column == sa.any_(array)


class _JsonbText(sa.types.UserDefinedType[str]):
    """jsonb that is given as text already."""

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
    return "text"


async def insert_many(
    conn: AsyncConnection,
    table: sa.Table,
    columns: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    *,
    on_conflict: str = "",
) -> None:
    """Insert rows of plain values (JSON already as text); `on_conflict` is the SQL that follows.

    Past SQLAlchemy's own insert, which for these sizes spends more time on parameters than the
    database on rows.
    """
    if not rows:
        return
    if conn.dialect.name == "postgresql" and len(rows) >= COPY_ROWS and not on_conflict:
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
    typed = ", ".join(f"{name} {_sql_type(table.c[name])}" for name in columns)
    picked = ", ".join(
        f"v.{name}::jsonb" if isinstance(table.c[name].type, sa.JSON) else f"v.{name}"
        for name in columns
    )
    await conn.exec_driver_sql(
        f"INSERT INTO {table.name} ({names}) "  # noqa: S608
        f"SELECT {picked} FROM json_to_recordset(%s::json) AS v({typed}) {on_conflict}",
        (_records(columns, rows),),
    )


async def _copy(
    conn: AsyncConnection, table: sa.Table, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> None:
    """The same by COPY, in the caller's transaction: as text, which the driver escapes."""
    driver = (await conn.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)  # noqa: S101 - there is only this driver
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier(table.name), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    try:
        async with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                await copy.write_row(row)
    except psycopg.Error as error:
        # As SQLAlchemy reports errors of its own statements, so that all are treated alike.
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
    return orjson.dumps([dict(zip(columns, row, strict=True)) for row in rows]).decode()
