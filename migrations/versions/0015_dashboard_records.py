"""What the dashboard shows: the planned size of trials, and the last imports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0015"
down_revision = "0014"
# The version before leaves both alone: its trials have no planned size, its imports no row.
compatible_from = "0006"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("trials", sa.Column("planned_clicked", sa.BigInteger, nullable=True))
    op.create_table(
        "imports",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=True),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=True),
        sa.Column("accepted", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("duplicates", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rejected", JSON, nullable=False, server_default="{}"),
        sa.Column("problem", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_imports"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("imports")
    op.drop_column("trials", "planned_clicked")
