"""Delivery of webhook messages by workers: at least once, with leases and a limit on tries."""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple

import sqlalchemy as sa

from app.core.database import Database
from app.core.logging import get_logger
from app.core.settings import Settings
from app.core.tables import clock_us, now_us
from app.webhooks.outbox import target_of
from app.webhooks.sender import DeliveryError, send, signature_headers
from app.webhooks.tables import webhook_messages as messages

log = get_logger(__name__)

BATCH = 16  # messages at a time
LEASE_SECONDS = 20.0  # longer than a try takes: a worker that was killed lets go of its messages
MAX_TRIES = 12
FIRST_PAUSE_SECONDS = 10.0  # doubles with each try: the last comes after some six hours
PAUSE_SPREAD = 0.2  # so that a receiver that comes back does not get all at once
MAX_AGE_SECONDS = 3 * 86_400.0
"""The age at which workers delete messages for receivers that no worker's settings name."""


class _Message(NamedTuple):
    message_id: str
    target: str
    type: str
    body: str
    attempt: int


class WebhookDelivery:
    """Delivers the messages for the receivers of this worker's settings."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._urls = {target_of(url): url for url in settings.webhook_targets}
        secret = settings.webhook_secret
        self._secret = "" if secret is None else secret.get_secret_value()
        self._private = settings.webhook_private

    async def deliver(self) -> int:
        """Sends every message that is due; returns the number that receivers accepted."""
        taken = 0
        while claimed := await self._claim():
            results = await asyncio.gather(*(self._deliver(message) for message in claimed))
            taken += sum(results)
        return taken

    async def delete_old(self) -> None:
        """Deletes messages older than ``MAX_AGE_SECONDS``, such as those for a removed receiver."""
        before = now_us() - int(MAX_AGE_SECONDS * 1e6)
        async with self._database.write() as conn:
            deleted = await conn.execute(messages.delete().where(messages.c.created_at < before))
        if deleted.rowcount:
            log.warning("old webhook messages deleted", messages=deleted.rowcount)

    async def _claim(self) -> list[_Message]:
        """Claims the messages that this worker sends next, for the time of a lease."""
        now = clock_us(self._database.dialect)
        columns = [messages.c[name] for name in _Message._fields]
        due = (
            sa.select(*columns)
            .where(messages.c.next_at <= now, messages.c.target.in_(self._urls))
            .order_by(messages.c.next_at)
            .limit(BATCH)
        )
        found = [_Message(*row) for row in await self._database.fetch(due)]
        if not found:
            return []
        claimed: list[_Message] = []
        async with self._database.write() as conn:
            for message in found:
                update = (
                    messages.update()
                    .where(_held(message), messages.c.next_at <= now)
                    .values(attempt=message.attempt + 1, next_at=now + int(LEASE_SECONDS * 1e6))
                )
                if (await conn.execute(update)).rowcount == 1:
                    claimed.append(message._replace(attempt=message.attempt + 1))
        return claimed

    async def _deliver(self, message: _Message) -> bool:
        body = message.body.encode()
        headers = signature_headers(self._secret, message.message_id, int(time.time()), body)
        about = {"message": message.message_id, "type": message.type, "tries": message.attempt}
        try:
            await send(self._urls[message.target], headers, body, private=self._private)
        except DeliveryError as error:
            await self._fail(message)
            event = "webhook dropped" if message.attempt >= MAX_TRIES else "webhook not delivered"
            log.warning(event, reason=str(error), **about)
            return False
        async with self._database.write() as conn:
            await conn.execute(messages.delete().where(_held(message)))
        log.info("webhook delivered", **about)
        return True

    async def _fail(self, message: _Message) -> None:
        async with self._database.write() as conn:
            if message.attempt >= MAX_TRIES:
                await conn.execute(messages.delete().where(_held(message)))
                return
            pause = pause_seconds(message.attempt)
            next_at = clock_us(self._database.dialect) + int(pause * 1e6)
            await conn.execute(messages.update().where(_held(message)).values(next_at=next_at))


def pause_seconds(attempt: int) -> float:
    """The pause after a failed try, in seconds, with a random spread."""
    spread = 1 + random.uniform(-PAUSE_SPREAD, PAUSE_SPREAD)  # noqa: S311 - no secret
    pause: float = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * spread
    return pause


def _held(message: _Message) -> sa.ColumnElement[bool]:
    return (messages.c.message_id == message.message_id) & (messages.c.attempt == message.attempt)
