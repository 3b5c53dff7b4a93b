"""Attributes of users, merged users, and indexes for ids that begin with a prefix."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from app.core.migrations import create_index_concurrently

revision = "0009"
down_revision = "0008"
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
    op.create_table(
        "user_aliases",
        sa.Column("external_id", sa.Text, nullable=False),
        sa.Column("user_id", sa.BigInteger, nullable=False),
        sa.Column("first_seq", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("preferences", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("external_id", name="pk_user_aliases"),
        # The version before erases users without a thought of these rows.
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name="fk_user_aliases_user_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_user_aliases_user_id_seq", "user_aliases", ["user_id", "seq"])
    op.create_index("ix_user_aliases_seq", "user_aliases", ["seq"])


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("user_aliases")
    op.drop_column("users", "attributes")
    if op.get_context().dialect.name == "postgresql":
        for table in PREFIXED:
            op.drop_index(f"ix_{table}_external_id_prefix", table)
