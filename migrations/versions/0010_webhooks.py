"""Webhook messages that wait to be delivered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
# The version before tells nobody anything, and works as before.
compatible_from = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "webhook_messages",
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("message_id", name="pk_webhook_messages"),
    )
    op.create_index("ix_webhook_messages_next_at", "webhook_messages", ["next_at"])


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("webhook_messages")
