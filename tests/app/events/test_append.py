"""The transaction that appends events: seqs in the order of commits, and imports."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
import sqlalchemy as sa

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.settings import load_settings, normalise_database_url
from app.events.append import EventAppender
from app.events.counts import EventCounts
from app.events.event_weights import EventWeights
from app.events.repository import EventRepository
from app.events.schemas import NewEvent
from app.events.service import EventService
from app.events.tables import events
from app.wiring import Services

pytestmark = pytest.mark.anyio

WRITERS = 5
TRANSACTIONS = 25


class RollBackError(Exception):
    """Rolls a transaction back."""


async def write(database: Database, name: str) -> set[str]:
    """Commit transactions of random length, some rolled back; return the committed event ids."""
    chance = random.Random(name)
    repository = EventRepository(database, EventWeights.parse(None))
    appender = EventAppender(
        database, repository, CatalogService(database), lambda: None, EventCounts(database)
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
                await appender.append_in(conn, [rows[:3], rows[3:]], Counter())
                await asyncio.sleep(chance.random() * 0.01)
                if chance.random() < 0.2:
                    raise RollBackError
        except RollBackError:
            continue
        written |= {row.event_id for row in rows}
        await asyncio.sleep(chance.random() * 0.003)
    return written


async def follow(database: Database, done: asyncio.Event) -> list[int]:
    """Return the seqs seen by a reader who always continues from the last one."""
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


@pytest.mark.slow
async def test_a_reader_that_follows_the_seqs_misses_no_late_commit(database_url: str) -> None:
    url = normalise_database_url(database_url)
    databases = [Database(url) for _ in range(WRITERS + 2)]
    done = asyncio.Event()
    try:
        async with asyncio.timeout(120):
            readers = [
                asyncio.create_task(follow(database, done)) for database in databases[WRITERS:]
            ]
            written = set().union(
                *await asyncio.gather(
                    *(write(database, f"w{i}") for i, database in enumerate(databases[:WRITERS]))
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
    # In order, so nothing twice; all seqs, so nothing was missed.
    for seqs in seen:
        assert seqs == [row.seq for row in rows]
    # Transactions that are rolled back take no seq.
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))


async def test_importing_the_same_rows_again_adds_nothing(services: Services) -> None:
    rows = [NewEvent(f"r{k}", f"u{k % 50}", f"i{k % 70}", "rating", 4.0, k) for k in range(3000)]
    first = await services.events.import_rows(rows)
    assert (first.accepted, first.duplicates, first.conflicts) == (3000, 0, 0)
    before = await services.events.last_seq()
    changed = [*rows[:-1], rows[-1]._replace(item="other")]
    second = await services.events.import_rows(changed)
    assert (second.accepted, second.duplicates, second.conflicts) == (0, 2999, 1)
    assert await services.events.last_seq() == before == 3000
