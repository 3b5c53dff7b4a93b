"""When items may be recommended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
# The version before knows no such times, and leaves them as they are.
compatible_from = "0006"
branch_labels = None
depends_on = None

COLUMNS = ("available_from", "available_until")


def upgrade() -> None:
    """Apply this revision."""
    for name in COLUMNS:
        op.add_column("items", sa.Column(name, sa.BigInteger, nullable=True))


def downgrade() -> None:
    """Revert this revision."""
    for name in COLUMNS:
        op.drop_column("items", name)
