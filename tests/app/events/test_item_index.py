"""The index of events by item: missing during a large import, and built however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from app.core.database import Database
from app.core.settings import Settings
from app.events.item_index import ItemIndex, mend_at
from app.events.tables import events, users
from app.main import create_app
from app.transfer import import_data
from app.transfer.import_data import import_source
from app.wiring import Services, build_services
from ncr_core.data.readers import open_source
from tests.app.conftest import client_of, until
from tests.conftest import ON_POSTGRESQL

pytestmark = pytest.mark.anyio

# `ncr import` whose large data sets are small. It stops for good in the middle when it is told to.
PROGRAM = """
import sys, time
from app.transfer import import_data
import_data.EVENTS_A_COMMIT, import_data.MIN_ROWS_WITHOUT_INDEX = 100, 1_000
if sys.argv.pop(1) == "stop":
    from app.events.service import EventService
    store, commits = EventService.import_new, []
    async def import_new(self, *arguments):
        result = await store(self, *arguments)
        commits.append(result)
        if len(commits) == 6:
            print("half", flush=True)
            time.sleep(600)
        return result
    EventService.import_new = import_new
from app.cli.main import main
main()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    rows = [f"u{n * 7 % 50},i{n % 13},{n}" for n in range(1_200)]
    path.write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_data, "EVENTS_A_COMMIT", 100)
    monkeypatch.setattr(import_data, "MIN_ROWS_WITHOUT_INDEX", 1_000)


def program(settings: Settings, how: str, path: Path) -> Popen[str]:
    env = os.environ | {
        "NCR_DATA_DIR": str(settings.data_dir),
        "NCR_DATABASE_URL": settings.effective_database_url,
    }
    return Popen([sys.executable, "-c", PROGRAM, how, "import", str(path)], env=env, stdout=PIPE,
                 text=True)  # fmt: skip


def killed(settings: Settings, path: Path) -> None:
    """An import that is killed after half of its commits."""
    process = program(settings, "stop", path)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()


async def stored(services: Services) -> list[tuple[Any, ...]]:
    columns = (events.c.seq, events.c.event_id, users.c.external_id, events.c.timestamp)
    query = sa.select(*columns).join(users, users.c.id == events.c.user_id).order_by(events.c.seq)
    return [tuple(row) for row in await services.database.fetch(query)]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
async def test_a_large_import_builds_the_index_at_its_end(services: Services, log: Path) -> None:
    seen: list[bool] = []
    put_off = services.events.item_index.put_off

    def on_index() -> None:
        seen.append(True)

    report = await import_source(
        services, open_source(log), on_bad=print, on_bytes=lambda n: None, on_index=on_index
    )
    assert (report.accepted, report.duplicates, seen) == (1_200, 0, [True])
    assert await services.events.item_index.exists()
    before = await stored(services)
    # Nothing new: the index is left alone.
    report = await import_source(
        services, open_source(log), on_bad=print, on_bytes=lambda n: None, on_index=on_index
    )
    assert (report.accepted, report.duplicates, seen) == (0, 1_200, [True])
    assert await stored(services) == before
    async with put_off():
        assert not await services.events.item_index.exists()
        # What needs the index to be fast gives the same without it.
        _, counts = await services.events.popularity()
        assert sum(n for _, n in counts) == len({(n * 7 % 50, n % 13) for n in range(1_200)})
        # Others leave it to who has put it off.
        other = Database(services.settings.effective_database_url)
        assert not await ItemIndex(other).mend()
        assert not await ItemIndex(other).exists()
        await other.close()
    assert await services.events.item_index.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
async def test_the_same_events_are_stored_with_the_index_and_without(
    services: Services, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await import_source(services, open_source(log), on_bad=print, on_bytes=lambda n: None)
    put_off = await stored(services)
    async with services.database.write() as conn:
        await conn.execute(events.delete())
        await conn.execute(sa.text("UPDATE counters SET value = 0 WHERE name = 'event_seq'"))
    monkeypatch.setattr(import_data, "MIN_ROWS_WITHOUT_INDEX", 10_000)
    await import_source(services, open_source(log), on_bad=print, on_bytes=lambda n: None)
    assert await stored(services) == put_off


async def test_an_error_leaves_it_to_the_next_import(services: Services, log: Path) -> None:
    with pytest.raises(RuntimeError):
        async with services.events.item_index.put_off():
            raise RuntimeError
    assert not await services.events.item_index.exists()
    await import_source(services, open_source(log), on_bad=print, on_bytes=lambda n: None)
    assert await services.events.item_index.exists()


@pytest.mark.e2e
@pytest.mark.parametrize("mended_by", ["import", "upgrade", "server"])
async def test_a_killed_import_is_mended(settings: Settings, log: Path, mended_by: str) -> None:
    await asyncio.to_thread(killed, settings, log)
    services = await build_services(settings)
    try:
        half = await stored(services)
        assert len(half) == 600
        index = services.events.item_index
        assert not await index.exists()
        if mended_by == "upgrade":
            assert await mend_at(settings.effective_database_url)
            assert not await mend_at(settings.effective_database_url)
        elif mended_by == "server":
            app = create_app(settings)
            async with app.router.lifespan_context(app), client_of(app) as client:
                answer = await client.post("/events", json={"user": "u", "item": "i"})
                assert answer.status_code == 200
                await until(index.exists)
                assert (await client.get("/recommend/u?n=3")).status_code == 200
        process = program(settings, "go", log)
        printed, _ = await asyncio.to_thread(process.communicate)
        assert printed.startswith("600 events added, 600 already there"), printed
        assert await index.exists()
        after = await stored(services)
        assert after[:600] == half
        assert len({event_id for _, event_id, _, _ in after}) == 1_200 + (mended_by == "server")
        assert not list(settings.data_dir.glob("*lock*"))
    finally:
        await services.close()


@ON_POSTGRESQL
async def test_it_is_built_where_requests_may_not_take_so_long(
    services: Services, settings: Settings
) -> None:
    """Operators set such limits for all sessions of a database, or of a role."""
    limit_s, url = 0.2, settings.effective_database_url
    name = services.database.url.database
    limits = ("statement_timeout", "lock_timeout")
    plain = url.replace("+psycopg", "")
    with psycopg.connect(plain, autocommit=True) as operator:
        try:
            for limit in limits:
                operator.execute(f'ALTER DATABASE "{name}" SET {limit} = {limit_s * 1000:.0f}')
            operator.execute("DROP INDEX ix_events_item_id_user_id")
            with psycopg.connect(plain, options="-c statement_timeout=0") as writer:
                # Whoever builds an index beside writers waits for all that are under way.
                writer.execute("LOCK TABLE events IN ROW EXCLUSIVE MODE")  # as an insert does
                building = asyncio.create_task(mend_at(url))
                waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE query LIKE %s"
                query = "CREATE INDEX CONCURRENTLY%"
                await until(lambda: (True,) in operator.execute(waits, (query,)).fetchall())
                await asyncio.sleep(2 * limit_s)
                assert not building.done()
            assert await building
            assert await services.events.item_index.exists()
            # The limits hold for everybody else.
            with psycopg.connect(plain) as other, pytest.raises(psycopg.errors.QueryCanceled):
                other.execute("SELECT pg_sleep(5)")
        finally:
            for limit in limits:
                operator.execute(f'ALTER DATABASE "{name}" RESET {limit}')
