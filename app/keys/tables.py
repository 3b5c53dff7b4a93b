"""Keys as they are kept: never the key itself."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.metadata import metadata

api_keys = sa.Table(
    "api_keys",
    metadata,
    # The part of the key that is no secret: by it a key is found, listed and revoked.
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("roles", sa.Text, nullable=False),
    # SHA-256 of the whole key. It has 256 random bits: there is nothing to guess slowly.
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("rate", sa.Double, nullable=True),
    sa.Column("burst", sa.BigInteger, nullable=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # Never deleted: a service that once had a key does not open because the last one was revoked.
    sa.Column("revoked_at", sa.BigInteger, nullable=True),
)
