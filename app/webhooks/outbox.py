"""The outbox: the transaction of a change writes the messages, and workers send them later."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.settings import Settings
from app.core.tables import clock_us, now_us
from app.webhooks.tables import webhook_messages


def target_of(url: str) -> str:
    """The name of a receiver in the database, in place of the URL, which may hold a secret."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


class Outbox:
    """Adds a message for each receiver, and no message without receivers."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._targets = [target_of(url) for url in urls]

    @classmethod
    def from_settings(cls, settings: Settings) -> Outbox:
        """The outbox for the receivers that the settings name."""
        return cls(settings.webhook_targets)

    async def add(self, conn: AsyncConnection, kind: str, data: dict[str, Any]) -> None:
        """Adds messages in the caller's transaction.

        Args:
            conn: a connection in the transaction of the change that the messages report.
            kind: the type of the messages, such as `job.ended`.
            data: the content, ready for JSON.
        """
        if not self._targets:
            return
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = orjson.dumps({"type": kind, "timestamp": moment, "data": data}).decode()
        for target in self._targets:
            await conn.execute(
                webhook_messages.insert().values(
                    message_id=f"msg_{uuid.uuid4().hex}",
                    target=target,
                    type=kind,
                    body=body,
                    created_at=now_us(),
                    next_at=clock_us(conn.dialect.name),
                )
            )
