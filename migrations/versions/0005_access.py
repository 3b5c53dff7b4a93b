"""Who sent a training or changed the active version, and a secret that signs tokens."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    for table in ("jobs", "activations"):
        op.add_column(table, sa.Column("by", sa.Text, nullable=True))
    # Nullable, as SQLite adds no other column without a default.
    op.add_column("instance", sa.Column("token_secret", sa.Text, nullable=True))
    instance = sa.table("instance", sa.column("token_secret", sa.Text))
    op.execute(instance.update().values(token_secret=secrets.token_hex(32)))


def downgrade() -> None:
    """Revert this revision."""
    for table, column in (("instance", "token_secret"), ("activations", "by"), ("jobs", "by")):
        with op.batch_alter_table(table) as batch:
            batch.drop_column(column)
