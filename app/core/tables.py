"""The MetaData of all tables, column types, and counters of the whole service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from app.core.database import Database

metadata = sa.MetaData(
    # Named constraints, so that a migration can drop them by the same name on both databases.
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Json: sa.types.TypeEngine[Any] = sa.JSON(none_as_null=True).with_variant(
    JSONB(none_as_null=True), "postgresql"
)
"""JSON: `jsonb` on PostgreSQL; None is NULL."""

RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""An integer key that the database assigns. On SQLite the type must be INTEGER."""


def prefix_index(table: str) -> sa.Index:
    """The index for ids that begin with a prefix. On SQLite the unique index of ids serves."""
    index = sa.Index(
        f"ix_{table}_external_id_prefix",
        "external_id",
        postgresql_ops={"external_id": "text_pattern_ops"},
    )
    return index.ddl_if(dialect="postgresql")


EVENT_SEQ = "event_seq"
CATALOG_SEQ = "catalog_seq"
USER_SEQ = "user_seq"
"""The name of the counter of changes of users' descriptions."""

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)


# One row: the name of this database in Redis, which several databases may share, and in the mark of
# its checkpoint store, the secret by which servers sign tokens, and the oldest revision whose
# version of the service works with the schema.
instance = sa.Table(
    "instance",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("instance_id", sa.Text, nullable=False),
    sa.Column("token_secret", sa.Text, nullable=True),
    sa.Column("compatible_from", sa.Text, nullable=True),
    sa.CheckConstraint("id = 1", name="single"),
)


async def instance_id(database: Database) -> str:
    """The name of this database, which differs from the names of other databases."""
    name: str = (await database.fetch(sa.select(instance.c.instance_id)))[0][0]
    return name


async def next_values(conn: AsyncConnection, name: str, n: int = 1) -> int:
    """Take `n` numbers of a counter and return the first. With `n` = 0: only lock the counter.

    The row stays locked until the transaction commits. The order of the numbers is therefore the
    order of the commits, also on PostgreSQL: a reader that continues after a number misses no
    change. Writers of one counter wait for one another, as on SQLite. Group commit makes these
    waits rare.
    """
    value: int = (
        await conn.execute(
            counters.update()
            .where(counters.c.name == name)
            .values(value=counters.c.value + n)
            .returning(counters.c.value)
        )
    ).scalar_one()
    return value - n + 1


def current_value(name: str) -> sa.ScalarSelect[int]:
    """The value of a counter, as a scalar subquery."""
    return sa.select(counters.c.value).where(counters.c.name == name).scalar_subquery()


class Place(NamedTuple):
    """A row's place in a list that begins with the newest row."""

    created_at: int
    """Microseconds since 1970, UTC."""
    name: str
    """The row's id, which orders rows of the same moment."""


def newest_first(
    query: sa.Select[Any],
    created_at: sa.ColumnElement[Any],
    name: sa.ColumnElement[Any],
    below: Place | None,
) -> sa.Select[Any]:
    """The rows below a place, newest first. New rows do not move the rows below a place."""
    query = query.order_by(created_at.desc(), name.desc())
    return query if below is None else query.where(sa.tuple_(created_at, name) < sa.tuple_(*below))


def now_us() -> int:
    """The current time in microseconds since 1970, UTC, as all tables store it."""
    return time.time_ns() // 1000


def clock_us(dialect: str) -> sa.ColumnElement[int]:
    """The database's time in microseconds since 1970: the same for processes of any machine.

    On SQLite the time is this process's time, because only one machine opens the file.
    """
    if dialect == "sqlite":
        return sa.literal(now_us(), sa.BigInteger)
    seconds = sa.extract("epoch", sa.func.clock_timestamp())
    return sa.cast(seconds * 1_000_000, sa.BigInteger)
