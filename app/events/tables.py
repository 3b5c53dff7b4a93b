"""Who did what, in the order in which it was accepted."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.metadata import RowId, metadata

users = sa.Table(
    "users",
    metadata,
    sa.Column("id", RowId, primary_key=True),
    sa.Column("external_id", sa.Text, nullable=False, unique=True),
    # The seq of the user's last change; in the key of everything cached about the user.
    sa.Column("last_seq", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # An id is never given out again: who holds one from before must not meet another user.
    sqlite_autoincrement=True,
)

_ATTRIBUTED = sa.text("recommendation_id IS NOT NULL")

events = sa.Table(
    "events",
    metadata,
    # Explicit, from the counter, not counted up by the database: see `next_values`.
    # On SQLite it is the row's own number, so that appending is appending.
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("event_id", sa.Text, nullable=False, unique=True),
    sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=False),
    sa.Column("item_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("value", sa.Double, nullable=True),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.Column("recommendation_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # Both hold all that their query needs: a user's items in order, an item's distinct users.
    sa.Index("ix_events_user_id_seq", "user_id", "seq", "item_id"),
    sa.Index("ix_events_item_id_user_id", "item_id", "user_id"),
    # A version's clicks: a recommendation's id begins with the version.
    sa.Index(
        "ix_events_recommendation_id",
        "recommendation_id",
        sqlite_where=_ATTRIBUTED,
        postgresql_where=_ATTRIBUTED,
    ),
)


def when() -> sa.ColumnElement[int]:
    """When an event was, by the client's clock, but not after it was accepted: a clock that is fast
    must not let an old click outweigh a dislike of today.
    """
    late = events.c.timestamp > events.c.created_at
    return sa.case((late, events.c.created_at), else_=events.c.timestamp).label("timestamp")


# The seqs that no event has: an event was deleted, or a user erased. Of an erased user nothing is
# left but the number that is never given out again.
retractions = sa.Table(
    "retractions",
    metadata,
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("user_id", sa.BigInteger, nullable=False),
)

# Which of two items a user said to prefer.
preferences = sa.Table(
    "preferences",
    metadata,
    # From the same counter as the events': the two share one order, and one way to miss nothing.
    sa.Column("seq", RowId, primary_key=True, autoincrement=False),
    sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=False),
    sa.Column("winner_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("loser_id", sa.BigInteger, sa.ForeignKey("items.id"), nullable=False),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.CheckConstraint("winner_id <> loser_id", name="two_items"),
    sa.Index("ix_preferences_user_id_seq", "user_id", "seq"),
)
