"""The items table."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import Json, RowId, metadata, prefix_index

EMBEDDED = sa.text("embedding IS NOT NULL AND NOT deleted")
_BARE = sa.text("NOT described AND NOT deleted")

items = sa.Table(
    "items",
    metadata,
    sa.Column("id", RowId, primary_key=True),
    sa.Column("external_id", sa.Text, nullable=False, unique=True),
    sa.Column("title", sa.Text, nullable=True),
    sa.Column("categories", Json, nullable=False, server_default="[]"),
    sa.Column("hidden", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("attributes", Json, nullable=False, server_default="{}"),
    # False while only events have named the item.
    sa.Column("described", sa.Boolean, nullable=False, server_default=sa.false()),
    # Deleted items keep their row: events and models refer to it, and readers see the deletion.
    sa.Column("deleted", sa.Boolean, nullable=False, server_default=sa.false()),
    # The catalogue's number at the item's last change: readers ask for items above a number.
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    # Microseconds since 1970 between which the item may be recommended; NULL: always.
    sa.Column("available_from", sa.BigInteger, nullable=True),
    sa.Column("available_until", sa.BigInteger, nullable=True),
    # float32, the lowest byte first. All rows that are not deleted have as many numbers.
    sa.Column("embedding", sa.LargeBinary, nullable=True),
    sa.Index("ix_items_seq", "seq"),
    prefix_index("items"),
    sa.Index("ix_items_bare", "id", sqlite_where=_BARE, postgresql_where=_BARE),
    sa.Index("ix_items_embedded", "id", sqlite_where=EMBEDDED, postgresql_where=EMBEDDED),
    sqlite_autoincrement=True,
)
