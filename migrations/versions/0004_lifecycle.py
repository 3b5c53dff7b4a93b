"""Stated preferences, trials, activations, impressions and triggers of trainings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from app.core.migrations import create_index_concurrently

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ATTRIBUTED = sa.text("recommendation_id IS NOT NULL")
RUNNING = sa.text("status = 'running'")


def upgrade() -> None:
    """Apply this revision."""
    create_index_concurrently(
        "ix_events_recommendation_id",
        "events",
        ["recommendation_id"],
        sqlite_where=ATTRIBUTED,
        postgresql_where=ATTRIBUTED,
    )
    op.create_table(
        "preferences",
        sa.Column("seq", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("user_id", sa.BigInteger, nullable=False),
        sa.Column("winner_id", sa.BigInteger, nullable=False),
        sa.Column("loser_id", sa.BigInteger, nullable=False),
        sa.Column("timestamp", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_preferences"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_preferences_user_id"),
        sa.ForeignKeyConstraint(["winner_id"], ["items.id"], name="fk_preferences_winner_id"),
        sa.ForeignKeyConstraint(["loser_id"], ["items.id"], name="fk_preferences_loser_id"),
        sa.CheckConstraint("winner_id <> loser_id", name=op.f("ck_preferences_two_items")),
    )
    op.create_index("ix_preferences_user_id_seq", "preferences", ["user_id", "seq"])
    op.create_table(
        "served",
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("hour", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("lists", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("version", "hour", name="pk_served"),
    )
    op.create_table(
        "trials",
        sa.Column("trial_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("version_a", sa.Text, nullable=False),
        sa.Column("version_b", sa.Text, nullable=False),
        sa.Column("share", sa.Double, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=True),
        sa.Column("report", JSON, nullable=True),
        sa.PrimaryKeyConstraint("trial_id", name="pk_trials"),
        sa.CheckConstraint("kind IN ('interleaving', 'shadow')", name=op.f("ck_trials_kind")),
        sa.CheckConstraint("status IN ('running', 'ended')", name=op.f("ck_trials_status")),
        sa.CheckConstraint("version_a <> version_b", name=op.f("ck_trials_two_versions")),
    )
    op.create_index(
        "uq_trials_running",
        "trials",
        ["kind"],
        unique=True,
        sqlite_where=RUNNING,
        postgresql_where=RUNNING,
    )
    op.create_table(
        "trial_sums",
        sa.Column("trial_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "name", name="pk_trial_sums"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.trial_id"], name="fk_trial_sums_trial_id"),
    )
    op.create_table(
        "impressions",
        sa.Column("recommendation_id", sa.Text, nullable=False),
        sa.Column("trial_id", sa.Text, nullable=False),
        sa.Column("user_id", sa.BigInteger, nullable=True),
        sa.Column("teams", JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("recommendation_id", name="pk_impressions"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.trial_id"], name="fk_impressions_trial_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_impressions_user_id"),
    )
    op.create_index("ix_impressions_trial_id", "impressions", ["trial_id"])
    op.create_index("ix_impressions_user_id", "impressions", ["user_id"])
    op.create_table(
        "activations",
        sa.Column("generation", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("version", sa.Text, nullable=True),
        sa.Column("previous", sa.Text, nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", JSON, nullable=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("generation", name="pk_activations"),
        sa.CheckConstraint(
            "reason IN ('published', 'activated', 'rolled_back', 'returned')",
            name=op.f("ck_activations_reason"),
        ),
    )
    op.create_table(
        "triggers",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fired_at", sa.BigInteger, nullable=False),
        sa.Column("fired_seq", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_triggers"),
    )
    op.add_column(
        "activation",
        sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    """Revert this revision."""
    op.drop_index("ix_events_recommendation_id", "events")
    with op.batch_alter_table("activation") as batch:
        batch.drop_column("pinned")
    for table in (
        "triggers",
        "activations",
        "impressions",
        "trial_sums",
        "trials",
        "served",
        "preferences",
    ):
        op.drop_table(table)
