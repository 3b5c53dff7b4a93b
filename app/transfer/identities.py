"""The ids that a database counts up by itself: how far it is, and where it is to go on.

An id is never given out again, not even one of a row that was deleted: so the highest id in the
table is not enough to go by.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection


async def last_id(conn: AsyncConnection, table: sa.Table) -> int | None:
    """The highest id that the database has given out; None if it gives out none for this table."""
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
    elif _counted(table):
        seq = await conn.scalar(
            sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name}
        )
        return max(highest, int(seq or 0))
    return highest


async def go_on_after(conn: AsyncConnection, table: sa.Table, last: int | None) -> None:
    """Lets the database give out ids above `last` and above those in the table."""
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
    elif _counted(table):
        # Not a table with a key: there is nothing to update where no row was ever inserted.
        name = {"name": table.name}
        await conn.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), name)
        await conn.execute(
            sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"),
            {**name, "seq": highest},
        )


def _counted(table: sa.Table) -> bool:
    return bool(table.dialect_options["sqlite"]["autoincrement"])


async def _highest(conn: AsyncConnection, column: sa.Column[int]) -> int:
    return await conn.scalar(sa.select(sa.func.max(column))) or 0


async def _sequence(conn: AsyncConnection, column: sa.Column[int]) -> str | None:
    """The sequence behind a column, quoted as SQL wants it."""
    found: str | None = await conn.scalar(
        sa.select(sa.func.pg_get_serial_sequence(column.table.name, column.name))
    )
    return found
