"""Lists that were shown, for lists without what was shown and not taken."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0012"
down_revision = "0011"
# The version before hides nothing that was shown, and works as before.
compatible_from = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "shown_lists",
        sa.Column("external_id", sa.Text, nullable=False),
        sa.Column("shown_at", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("item_ids", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("external_id", "shown_at", name="pk_shown_lists"),
    )
    op.create_index("ix_shown_lists_shown_at", "shown_lists", ["shown_at"])


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("shown_lists")
