"""Retractions of events, by which servers notice changed profiles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "retractions",
        sa.Column("seq", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("user_id", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_retractions"),
    )


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("retractions")
