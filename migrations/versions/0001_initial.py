"""The first schema: counters, users, events, items, models, jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out here: a migration must not change when the application's tables do.
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ONE_RUNNING = sa.text("status = 'running' AND kind = 'train'")


def upgrade() -> None:
    """Apply this revision."""
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.bulk_insert(
        counters, [{"name": "event_seq", "value": 0}, {"name": "catalog_seq", "value": 0}]
    )

    op.create_table(
        "users",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("external_id", sa.Text, nullable=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("external_id", name="uq_users_external_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "items",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("external_id", sa.Text, nullable=False),
        sa.Column("title", sa.Text, nullable=True),
        sa.Column("categories", JSON, nullable=False, server_default="[]"),
        sa.Column("hidden", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("attributes", JSON, nullable=False, server_default="{}"),
        sa.Column("described", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("deleted", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_items"),
        sa.UniqueConstraint("external_id", name="uq_items_external_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_items_seq", "items", ["seq"])

    op.create_table(
        "events",
        sa.Column("seq", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("user_id", sa.BigInteger, nullable=False),
        sa.Column("item_id", sa.BigInteger, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=True),
        sa.Column("timestamp", sa.BigInteger, nullable=False),
        sa.Column("recommendation_id", sa.Text, nullable=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sa.UniqueConstraint("event_id", name="uq_events_event_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_events_user_id"),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_events_item_id"),
    )
    op.create_index("ix_events_user_id_seq", "events", ["user_id", "seq", "item_id"])
    op.create_index("ix_events_item_id_user_id", "events", ["item_id", "user_id"])

    op.create_table(
        "models",
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("factors", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("trained_seq", sa.BigInteger, nullable=False),
        sa.Column("users", sa.BigInteger, nullable=False),
        sa.Column("items", sa.BigInteger, nullable=False),
        sa.Column("interactions", sa.BigInteger, nullable=False),
        sa.Column("metrics", JSON, nullable=False, server_default="{}"),
        sa.Column("params", JSON, nullable=False, server_default="{}"),
        sa.Column("job_id", sa.Text, nullable=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("activated_at", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("version", name="pk_models"),
        sa.CheckConstraint(
            "status IN ('published', 'rejected', 'deleted')", name=op.f("ck_models_status")
        ),
    )
    activation = op.create_table(
        "activation",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("version", sa.Text, nullable=True),
        sa.Column("previous", sa.Text, nullable=True),
        sa.Column("activated_at", sa.BigInteger, nullable=True),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_activation"),
        sa.CheckConstraint("id = 1", name=op.f("ck_activation_single")),
    )
    op.bulk_insert(activation, [{"id": 1, "generation": 0}])

    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("params", JSON, nullable=False, server_default="{}"),
        sa.Column("progress", JSON, nullable=True),
        sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
        sa.Column("owner", sa.Text, nullable=True),
        sa.Column("lease_until", sa.BigInteger, nullable=True),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=True),
        sa.Column("finished_at", sa.BigInteger, nullable=True),
        sa.Column("model_version", sa.Text, nullable=True),
        sa.Column("metrics", JSON, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'rejected')",
            name=op.f("ck_jobs_status"),
        ),
    )
    op.create_index("ix_jobs_created_at_job_id", "jobs", ["created_at", "job_id"])
    op.create_index(
        "uq_jobs_running_train",
        "jobs",
        ["kind"],
        unique=True,
        sqlite_where=ONE_RUNNING,
        postgresql_where=ONE_RUNNING,
    )


def downgrade() -> None:
    """Revert this revision."""
    for table in ("jobs", "activation", "models", "events", "items", "users", "counters"):
        op.drop_table(table)
