"""API keys, and an id of the database that names its keys in Redis."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("roles", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("rate", sa.Double, nullable=True),
        sa.Column("burst", sa.BigInteger, nullable=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    instance = op.create_table(
        "instance",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("instance_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_instance"),
        sa.CheckConstraint("id = 1", name=op.f("ck_instance_single")),
    )
    op.bulk_insert(instance, [{"id": 1, "instance_id": secrets.token_hex(8)}])


def downgrade() -> None:
    """Revert this revision."""
    for table in ("instance", "api_keys"):
        op.drop_table(table)
