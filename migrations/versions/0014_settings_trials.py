"""Trials that give a share of the users other settings, and the lists of each user in them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0014"
down_revision = "0012"
# The version before sees none of these trials: its servers give nobody other settings.
compatible_from = "0006"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
RUNNING = sa.text("status = 'running'")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "settings_trials",
        sa.Column("trial_id", sa.Text, nullable=False),
        sa.Column("version_a", sa.Text, nullable=False),
        sa.Column("version_b", sa.Text, nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("share", sa.Double, nullable=False),
        sa.Column("planned_lists", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=True),
        sa.Column("report", JSON, nullable=True),
        sa.PrimaryKeyConstraint("trial_id", name="pk_settings_trials"),
        sa.CheckConstraint(
            "status IN ('running', 'ended')", name=op.f("ck_settings_trials_status")
        ),
    )
    op.create_index(
        "uq_settings_trials_running",
        "settings_trials",
        ["status"],
        unique=True,
        sqlite_where=RUNNING,
        postgresql_where=RUNNING,
    )
    op.create_table(
        "trial_lists",
        sa.Column("trial_id", sa.Text, nullable=False),
        sa.Column("arm", sa.Text, nullable=False),
        sa.Column("user_number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("lists", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "arm", "user_number", name="pk_trial_lists"),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["settings_trials.trial_id"], name="fk_trial_lists_trial_id"
        ),
    )


def downgrade() -> None:
    """Revert this revision."""
    op.drop_table("trial_lists")
    op.drop_table("settings_trials")
