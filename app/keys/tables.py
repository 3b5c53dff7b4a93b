"""The table of API keys, which holds digests and never a key itself."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import metadata

api_keys = sa.Table(
    "api_keys",
    metadata,
    # The public part of the key, by which it is found, listed and revoked.
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("roles", sa.Text, nullable=False),
    # SHA-256 of the whole key. The key has 256 random bits, so a slow hash would add nothing.
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("rate", sa.Double, nullable=True),
    sa.Column("burst", sa.BigInteger, nullable=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # Rows are never deleted: a service does not become open when its last key is revoked.
    sa.Column("revoked_at", sa.BigInteger, nullable=True),
)
