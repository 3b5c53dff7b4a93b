"""Attributes of users, and indexes for ids that begin with a prefix."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from app.core.migrations import create_index_concurrently

revision = "0009"
down_revision = "0007"
# The version before reads and writes what it knows of; all that is new has a default.
compatible_from = "0006"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
PREFIXED = ("users", "items")


def upgrade() -> None:
    """Apply this revision."""
    if op.get_context().dialect.name == "postgresql":
        for table in PREFIXED:
            create_index_concurrently(
                f"ix_{table}_external_id_prefix",
                table,
                ["external_id"],
                postgresql_ops={"external_id": "text_pattern_ops"},
            )
    op.add_column("users", sa.Column("attributes", JSON, nullable=False, server_default="{}"))


def downgrade() -> None:
    """Revert this revision."""
    op.drop_column("users", "attributes")
    if op.get_context().dialect.name == "postgresql":
        for table in PREFIXED:
            op.drop_index(f"ix_{table}_external_id_prefix", table)
