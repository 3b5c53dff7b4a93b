"""The table of webhook messages that wait to be delivered."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import metadata

webhook_messages = sa.Table(
    "webhook_messages",
    metadata,
    # One message for each event and receiver.
    sa.Column("message_id", sa.Text, primary_key=True),
    # A digest of the receiver's URL, which may hold a secret; see `outbox.target_of`.
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    # The JSON as it is signed and sent.
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    # Counts the claims of the message, and so fences off a worker that lost its lease.
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    # When the message is due: after a failure, or after the lease of the worker that sends it.
    sa.Column("next_at", sa.BigInteger, nullable=False),
    sa.Index("ix_webhook_messages_next_at", "next_at"),
)
