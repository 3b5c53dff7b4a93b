"""Whoever follows the events by their seq misses none, however late a commit is."""

from __future__ import annotations

import asyncio
import random

import pytest
import sqlalchemy as sa

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.settings import Settings, load_settings, normalise_database_url
from app.events.append import append
from app.events.feedback import Feedback
from app.events.repository import EventRepository
from app.events.schemas import NewEvent
from app.events.service import EventService
from app.events.tables import events

pytestmark = pytest.mark.anyio

WRITERS = 5
TRANSACTIONS = 25


class UndoneError(Exception):
    """A transaction is rolled back."""


async def write(database: Database, name: str) -> set[str]:
    """Transactions of random length, some of them undone; the ids of the events that count."""
    chance = random.Random(name)
    repository, catalog = (
        EventRepository(database, Feedback.of(Settings())),
        CatalogService(database),
    )
    written: set[str] = set()
    for turn in range(TRANSACTIONS):
        rows = [
            NewEvent(f"{name}-{turn}-{i}", f"u{chance.randrange(20)}", f"i{chance.randrange(30)}")
            for i in range(chance.randrange(1, 12))
        ]
        try:
            async with database.write() as conn:
                await asyncio.sleep(chance.random() * 0.003)
                await append(conn, repository, catalog, [rows[:3], rows[3:]])
                await asyncio.sleep(chance.random() * 0.01)
                if chance.random() < 0.2:
                    raise UndoneError
        except UndoneError:
            continue
        written |= {row.event_id for row in rows}
        await asyncio.sleep(chance.random() * 0.003)
    return written


async def follow(database: Database, done: asyncio.Event) -> list[int]:
    """The seqs, as somebody sees them who always goes on from the last one."""
    service = EventService(database, CatalogService(database), load_settings())
    seen: list[int] = []
    limit = random.Random(0)
    while True:
        over = done.is_set()
        new = await service.new_events(seen[-1] if seen else 0, limit.choice([1, 3, 1_000]))
        seen += [seq for seq, _, _ in new]
        if over and not new:
            return seen
        await asyncio.sleep(0)


async def test_a_reader_misses_no_late_commit(database_url: str) -> None:
    url = normalise_database_url(database_url)
    databases = [Database(url) for _ in range(WRITERS + 2)]
    done = asyncio.Event()
    try:
        async with asyncio.timeout(120):
            readers = [asyncio.create_task(follow(own, done)) for own in databases[WRITERS:]]
            written = set().union(
                *await asyncio.gather(
                    *(write(own, f"w{i}") for i, own in enumerate(databases[:WRITERS]))
                )
            )
            done.set()
            seen = await asyncio.gather(*readers)
        rows = await databases[0].fetch(
            sa.select(events.c.seq, events.c.event_id).order_by(events.c.seq)
        )
    finally:
        for database in databases:
            await database.close()
    assert {row.event_id for row in rows} == written
    # In order, so nothing twice; all that is there, so nothing was missed.
    for own in seen:
        assert own == [row.seq for row in rows]
    # What is undone takes no number either.
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
