"""What the dashboard shows: counts of events, and items that only events have named."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.core.migrations import create_index_concurrently

revision = "0011"
down_revision = "0010"
compatible_from = "0006"
branch_labels = None
depends_on = None

BARE = sa.text("NOT described AND NOT deleted")


def upgrade() -> None:
    """Apply this revision."""
    create_index_concurrently(
        "ix_items_bare", "items", ["id"], sqlite_where=BARE, postgresql_where=BARE
    )
    op.create_table(
        "event_counts",
        sa.Column("hour", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("hour", "verdict", "name", name="pk_event_counts"),
    )


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("event_counts")
    op.drop_index("ix_items_bare", "items")
