"""What recommendations by content take: items' embeddings, and which users' attributes changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.core.migrations import create_index_concurrently

revision = "0016"
down_revision = "0015"
# The version before leaves both columns as they are.
compatible_from = "0006"
branch_labels = None
depends_on = None

EMBEDDED = sa.text("embedding IS NOT NULL AND NOT deleted")
CHANGED = sa.text("attributes_seq IS NOT NULL")


def upgrade() -> None:
    """Apply this revision."""
    # An index ends the transaction: a run that was interrupted then finds the columns.
    again = True if op.get_context().dialect.name == "postgresql" else None
    embedding = sa.Column("embedding", sa.LargeBinary, nullable=True)
    changed = sa.Column("attributes_seq", sa.BigInteger, nullable=True)
    op.add_column("items", embedding, if_not_exists=again)
    op.add_column("users", changed, if_not_exists=again)
    create_index_concurrently(
        "ix_items_embedded", "items", ["id"], sqlite_where=EMBEDDED, postgresql_where=EMBEDDED
    )
    create_index_concurrently(
        "ix_users_attributes_seq",
        "users",
        ["attributes_seq"],
        sqlite_where=CHANGED,
        postgresql_where=CHANGED,
    )

    op.execute("INSERT INTO counters (name, value) VALUES ('user_seq', 0)")


def downgrade() -> None:
    """Revert this revision."""
    op.execute("DELETE FROM counters WHERE name = 'user_seq'")
    op.drop_index("ix_users_attributes_seq", "users")
    op.drop_index("ix_items_embedded", "items")
    op.drop_column("users", "attributes_seq")
    op.drop_column("items", "embedding")
