"""The one MetaData that every feature's tables belong to, and the service-wide counters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

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
"""JSON as each database keeps it best; None is NULL."""

RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""A key that counts up by itself: on SQLite only an INTEGER does."""

EVENT_SEQ = "event_seq"
CATALOG_SEQ = "catalog_seq"

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)


# One row: what names this database in whatever several servers share beside it.
instance = sa.Table(
    "instance",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("instance_id", sa.Text, nullable=False),
    sa.CheckConstraint("id = 1", name="single"),
)


async def next_values(conn: AsyncConnection, name: str, n: int = 1) -> int:
    """Take `n` numbers and return the first. With `n` = 0: lock the counter, return the next.

    The row stays locked until the transaction commits. So on PostgreSQL too, where transactions
    run side by side, the order of the numbers is the order of the commits: who has read up to a
    number misses nothing by going on from there. It costs that writers of one counter take turns,
    which they do on SQLite anyway and which the group commit makes rare.
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
    """The counter's value, as a subquery to read along with something else."""
    return sa.select(counters.c.value).where(counters.c.name == name).scalar_subquery()


def now_us() -> int:
    """The time as every table keeps it: microseconds since 1970, UTC."""
    return time.time_ns() // 1000
