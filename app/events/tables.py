"""Tables of users, merged users, events, stated preferences, retractions and shown lists."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import Json, RowId, metadata, prefix_index

_DESCRIBED_LATER = sa.text("attributes_seq IS NOT NULL")

users = sa.Table(
    "users",
    metadata,
    sa.Column("id", RowId, primary_key=True),
    sa.Column("external_id", sa.Text, nullable=False, unique=True),
    # The seq of the user's last change, which is in every cache key about the user.
    sa.Column("last_seq", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("attributes", Json, nullable=False, server_default="{}"),
    # The number of the last change of the attributes, from a counter of its own.
    sa.Column("attributes_seq", sa.BigInteger, nullable=True),
    prefix_index("users"),
    sa.Index(
        "ix_users_attributes_seq",
        "attributes_seq",
        sqlite_where=_DESCRIBED_LATER,
        postgresql_where=_DESCRIBED_LATER,
    ),
    # An id is never reused: a cache that still holds it must not show another user.
    sqlite_autoincrement=True,
)

# Users who were merged into another: what is posted for them later is the other's.
user_aliases = sa.Table(
    "user_aliases",
    metadata,
    sa.Column("external_id", sa.Text, primary_key=True),
    sa.Column(
        "user_id", sa.BigInteger, sa.ForeignKey("users.id", ondelete="CASCADE"), nullable=False
    ),
    # What moved has the seqs from the first to before the last, which is that of the retraction.
    sa.Column("first_seq", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("events", sa.BigInteger, nullable=False),
    sa.Column("preferences", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index("ix_user_aliases_user_id_seq", "user_id", "seq"),
    sa.Index("ix_user_aliases_seq", "seq"),
)


def was_moved(seq: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return an SQL expression: whether an event or preference got its seq by a merge of users."""
    # What merges have moved does not overlap: the next alias decides, by one look at the index. For
    # EXISTS PostgreSQL would read the whole table, once for each event.
    first = (
        sa.select(user_aliases.c.first_seq)
        .where(user_aliases.c.seq > seq)
        .order_by(user_aliases.c.seq)
        .limit(1)
        .scalar_subquery()
    )
    return sa.func.coalesce(first <= seq, sa.false(), type_=sa.Boolean)


_ATTRIBUTED = sa.text("recommendation_id IS NOT NULL")

events = sa.Table(
    "events",
    metadata,
    # From the counter, not from the database's own sequence: see `next_values`.
    # On SQLite it is the rowid, so that rows are appended in order.
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("event_id", sa.Text, nullable=False, unique=True),
    # On PostgreSQL triggers check both references, once a statement: see migration 0007.
    sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=False),
    sa.Column("item_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("value", sa.Double, nullable=True),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.Column("recommendation_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # Covering indexes: a user's items in order, and an item's distinct users.
    sa.Index("ix_events_user_id_seq", "user_id", "seq", "item_id"),
    sa.Index("ix_events_item_id_user_id", "item_id", "user_id"),
    # For click attribution: a recommendation's id begins with the model version.
    sa.Index(
        "ix_events_recommendation_id",
        "recommendation_id",
        sqlite_where=_ATTRIBUTED,
        postgresql_where=_ATTRIBUTED,
    ),
)


def event_time() -> sa.ColumnElement[int]:
    """Return the time of an event as an SQL expression, in microseconds since 1970.

    The time is the client's timestamp, but at most the time of acceptance. Otherwise an old
    click with a timestamp in the future would outweigh a dislike of today.
    """
    is_future = events.c.timestamp > events.c.created_at
    return sa.case((is_future, events.c.created_at), else_=events.c.timestamp).label("timestamp")


# The seqs of deletions: of an event, or of a user. Of an erased user only this number is left.
retractions = sa.Table(
    "retractions",
    metadata,
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("user_id", sa.BigInteger, nullable=False),
)

# Which of two items a user prefers.
preferences = sa.Table(
    "preferences",
    metadata,
    # From the counter of the events: both share one order, and readers follow one number.
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=False),
    sa.Column("winner_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("loser_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.CheckConstraint("winner_id <> loser_id", name="two_items"),
    sa.Index("ix_preferences_user_id_seq", "user_id", "seq"),
)

# Rows by hour, for people: which types are accepted, and why others are rejected.
event_counts = sa.Table(
    "event_counts",
    metadata,
    # Hours since 1970, UTC.
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("verdict", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("rows", sa.BigInteger, nullable=False),
)

# Lists that were shown to users whose lists leave out what they did not take. Users are named by
# the client's id: one without events has no row of their own.
shown_lists = sa.Table(
    "shown_lists",
    metadata,
    sa.Column("external_id", sa.Text, primary_key=True),
    sa.Column("shown_at", sa.BigInteger, primary_key=True, autoincrement=False),
    # The last seq of the service then: events with a later one came after the list.
    sa.Column("seq", sa.BigInteger, nullable=False),
    # Internal ids, and their number.
    sa.Column("item_ids", Json, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Index("ix_shown_lists_shown_at", "shown_at"),
)

# The last imports of files, for people: who, when, and what came of the rows.
imports = sa.Table(
    "imports",
    metadata,
    sa.Column("id", RowId, primary_key=True),
    # `command` or `page`.
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    # The id of an API key, or an account of the machine.
    sa.Column("by", sa.Text, nullable=True),
    sa.Column("started_at", sa.BigInteger, nullable=False),
    # NULL while it runs, and of one that was killed.
    sa.Column("ended_at", sa.BigInteger, nullable=True),
    sa.Column("accepted", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("duplicates", sa.BigInteger, nullable=False, server_default="0"),
    # Rows by the reason for which they were rejected.
    sa.Column("rejected", Json, nullable=False, server_default="{}"),
    sa.Column("problem", sa.Text, nullable=True),
    sqlite_autoincrement=True,
)
