"""The oldest revision whose version of the service works with the schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
# The version before does not read the column: it wants its own schema.
compatible_from = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("instance", sa.Column("compatible_from", sa.Text, nullable=True))


def downgrade() -> None:
    """Revert this revision."""
    with op.batch_alter_table("instance") as batch:
        batch.drop_column("compatible_from")
