"""Tables of the registry: models, the active version, and its history."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import Json, metadata

models = sa.Table(
    "models",
    metadata,
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("factors", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    # SHA-256 of the checkpoint's manifest, which holds those of the other files.
    sa.Column("checksum", sa.Text, nullable=False),
    # The model was trained on the events up to this seq.
    sa.Column("trained_seq", sa.BigInteger, nullable=False),
    sa.Column("users", sa.BigInteger, nullable=False),
    sa.Column("items", sa.BigInteger, nullable=False),
    sa.Column("interactions", sa.BigInteger, nullable=False),
    sa.Column("metrics", Json, nullable=False, server_default="{}"),
    sa.Column("params", Json, nullable=False, server_default="{}"),
    sa.Column("job_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("activated_at", sa.BigInteger, nullable=True),
    sa.CheckConstraint("status IN ('published', 'rejected', 'deleted')", name="status"),
)

# One row: the active version. The generation grows with every change.
activation = sa.Table(
    "activation",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Text, nullable=True),
    sa.Column("previous", sa.Text, nullable=True),
    sa.Column("activated_at", sa.BigInteger, nullable=True),
    sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
    # While it is set, newly trained versions are published without being activated.
    sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.CheckConstraint("id = 1", name="single"),
)

# Every change of the active version, and why.
activations = sa.Table(
    "activations",
    metadata,
    sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Text, nullable=True),
    sa.Column("previous", sa.Text, nullable=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("detail", Json, nullable=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    # The id of the key that asked for the change; NULL for the service itself.
    sa.Column("by", sa.Text, nullable=True),
    sa.CheckConstraint(
        "reason IN ('published', 'activated', 'rolled_back', 'returned')", name="reason"
    ),
)
