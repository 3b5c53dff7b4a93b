"""Tables of jobs, the queue of background work, and of the triggers of trainings."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import Json, metadata

_ONE_RUNNING = sa.text("status = 'running' AND kind = 'train'")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("params", Json, nullable=False, server_default="{}"),
    sa.Column("progress", Json, nullable=True),
    # Counts the claims of the job, and so fences off a worker that lost its lease.
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    sa.Column("owner", sa.Text, nullable=True),
    sa.Column("lease_until", sa.BigInteger, nullable=True),
    sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=True),
    sa.Column("finished_at", sa.BigInteger, nullable=True),
    sa.Column("model_version", sa.Text, nullable=True),
    sa.Column("metrics", Json, nullable=True),
    sa.Column("error", sa.Text, nullable=True),
    # The id of the key that asked for the job; NULL for the service itself.
    sa.Column("by", sa.Text, nullable=True),
    sa.CheckConstraint(
        "status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'rejected')",
        name="status",
    ),
    sa.Index("ix_jobs_created_at_job_id", "created_at", "job_id"),
    # At most one training runs, whatever the number of workers.
    sa.Index(
        "uq_jobs_running_train",
        "kind",
        unique=True,
        sqlite_where=_ONE_RUNNING,
        postgresql_where=_ONE_RUNNING,
    ),
)

# When each trigger of trainings last fired. All workers share these rows.
triggers = sa.Table(
    "triggers",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("fired_at", sa.BigInteger, nullable=False),
    # The events' last seq at that time.
    sa.Column("fired_seq", sa.BigInteger, nullable=False),
)
