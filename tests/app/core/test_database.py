"""The database by itself: nothing is lost, whatever runs side by side."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from app.all_tables import metadata
from app.core import database as database_module
from app.core.bulk import insert_many, one_of
from app.core.database import CHECKPOINT_PAGES, Database, checkpoint, log_pages, version_warning
from app.core.migrations import migrate
from app.core.tables import CATALOG_SEQ, EVENT_SEQ, counters, next_values
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = pytest.mark.anyio

users = metadata.tables["users"]
items = metadata.tables["items"]


async def _value(database: Database, name: str) -> int:
    rows = await database.fetch(sa.select(counters.c.value).where(counters.c.name == name))
    return int(rows[0][0])


async def test_concurrent_read_then_write_loses_nothing(database: Database) -> None:
    async def increment() -> None:
        for _ in range(25):
            async with database.write() as conn:
                # Read, think, write: the pattern that loses updates unless a lock comes first.
                query = sa.select(counters.c.value).where(counters.c.name == CATALOG_SEQ)
                value = (await conn.execute(query.with_for_update())).scalar_one()
                await asyncio.sleep(0)
                await conn.execute(
                    counters.update().where(counters.c.name == CATALOG_SEQ).values(value=value + 1)
                )

    await asyncio.gather(*(increment() for _ in range(10)))
    assert await _value(database, CATALOG_SEQ) == 250


async def test_writers_of_two_connections_take_turns(database: Database) -> None:
    other = Database(database.url.render_as_string(hide_password=False))

    async def take(db: Database) -> list[int]:
        taken = []
        for _ in range(20):
            async with db.write() as conn:
                taken.append(await next_values(conn, EVENT_SEQ, 3))
        return taken

    first, second = await asyncio.gather(take(database), take(other))
    await other.close()
    assert sorted(first + second) == list(range(1, 121, 3))


async def test_an_error_rolls_back(database: Database) -> None:
    async def fail() -> None:
        async with database.write() as conn:
            await next_values(conn, EVENT_SEQ, 5)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await fail()
    assert await _value(database, EVENT_SEQ) == 0


async def test_cancellation_rolls_back_and_frees_the_writer(database: Database) -> None:
    started = asyncio.Event()

    async def hang() -> None:
        async with database.write() as conn:
            await next_values(conn, EVENT_SEQ, 5)
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hang())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), database.write() as conn:
        assert await next_values(conn, EVENT_SEQ) == 1


@ON_SQLITE
async def test_a_task_cancelled_amid_its_rows_leaves_no_lock(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer does not wait for a collection of garbage."""
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.5)
    other, moments = Database(str(database.url)), random.Random(0)

    async def write() -> None:
        while True:
            async with other.write() as conn:
                await conn.execute(counters.update().values(value=1).returning(counters.c.value))
                await conn.execute(sa.select(counters))

    gc.disable()
    try:
        for _ in range(150):
            task = asyncio.create_task(write())
            await asyncio.sleep(0.005 * moments.random())
            task.cancel()
            await asyncio.wait([task])
            async with other.write() as conn:
                await conn.execute(counters.update().values(value=2))
    finally:
        gc.enable()
        await other.close()


async def test_next_values_of_0_take_no_number(database: Database) -> None:
    async with database.write() as conn:
        assert await next_values(conn, EVENT_SEQ, 0) == 1
        assert await next_values(conn, EVENT_SEQ, 2) == 1
        assert await next_values(conn, EVENT_SEQ, 0) == 3


async def test_one_of_compares_many_values_unchanged(database: Database) -> None:
    names = [f"n{i}" for i in range(5000)] + ['"', "\\", "'", "%s", "?", "😀", "é", "e\u0301", "A"]
    async with database.write() as conn:
        await insert_many(conn, users, ("external_id", "created_at"), [(name, 1) for name in names])
        found = await conn.execute(
            sa.select(users.c.external_id).where(
                one_of(users.c.external_id, [*names, "a", "absent"], database.dialect)
            )
        )
        # Byte by byte: neither case nor the form of an accent makes two ids one.
        assert sorted(found.scalars()) == sorted(names)
        none = await conn.execute(
            sa.select(users.c.id).where(one_of(users.c.id, [], database.dialect))
        )
        assert none.all() == []


async def test_json_is_read_as_it_was_written(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(
            items.insert().values(
                external_id="i",
                categories=["a", "ü"],
                attributes={"k": [1, None, "😀"]},
                seq=1,
                created_at=1,
                updated_at=1,
            )
        )
    row = (await database.fetch(sa.select(items.c.categories, items.c.attributes)))[0]
    assert tuple(row) == (["a", "ü"], {"k": [1, None, "😀"]})


async def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        async with database.write() as conn:
            await conn.execute(
                metadata.tables["events"]
                .insert()
                .values(
                    seq=1, event_id="e", user_id=9, item_id=9, type="t", timestamp=1, created_at=1
                )
            )


async def test_the_schema_permits_one_running_training(database: Database) -> None:
    jobs = metadata.tables["jobs"]

    async def add(job_id: str, kind: str, status: str) -> None:
        async with database.write() as conn:
            await conn.execute(
                jobs.insert().values(job_id=job_id, kind=kind, status=status, created_at=1)
            )

    await add("1", "train", "running")
    await add("2", "train", "queued")
    await add("3", "other", "running")
    await add("4", "other", "running")
    with pytest.raises(sa.exc.IntegrityError):
        await add("5", "train", "running")
    with pytest.raises(sa.exc.IntegrityError):
        await add("6", "train", "no such status")


@ON_POSTGRESQL
async def test_heavy_reads_leave_connections_for_the_others(database: Database) -> None:
    slow = sa.select(sa.func.pg_sleep(0.5))
    heavy = [asyncio.create_task(database.fetch_heavy(slow, 10.0)) for _ in range(30)]
    await asyncio.sleep(0.1)  # they have what they can get of the connections
    await database.ping()
    assert not any(task.done() for task in heavy)
    for task in heavy:
        task.cancel()
    await asyncio.wait(heavy)


@ON_POSTGRESQL
async def test_a_heavy_read_ends_when_its_time_is_over(database: Database) -> None:
    with pytest.raises(OperationalError):
        await database.fetch_heavy(sa.select(sa.func.pg_sleep(30)), 0.05)
    # The connection is as before: the next one may take longer.
    assert await database.fetch_heavy(sa.select(sa.func.pg_sleep(0.1)), 30.0)


pytestmark = pytest.mark.anyio

PAGE_BYTES = 4096
WRITER = """
import asyncio, sys
import sqlalchemy as sa
from app.core.database import Database

async def main():
    database = Database(sys.argv[1])
    for n in range(int(sys.argv[2]), 10**9, 2):
        async with database.write() as conn:
            row = {"key": f"k{n}", "value": "x" * 200_000}
            await conn.execute(sa.text("INSERT INTO blobs VALUES (:key, :value)"), row)
        print(n, flush=True)

asyncio.run(main())
"""


def path_of(database: Database) -> Path:
    return Path(str(database.url.database))


async def write_pages(database: Database, pages: int) -> None:
    async with database.write() as conn:
        await conn.execute(sa.text("CREATE TABLE IF NOT EXISTS blobs (key TEXT, value TEXT)"))
        row = {"value": "x" * (pages * PAGE_BYTES)}
        await conn.execute(sa.text("INSERT INTO blobs VALUES ('one', :value)"), row)


@ON_SQLITE
async def test_the_log_stays_short_without_a_server(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "CHECKPOINT_PAGES", 400)
    for _ in range(40):
        await write_pages(database, 100)
        assert log_pages(path_of(database)) < 400 + 110
    size = Path(f"{path_of(database)}-wal").stat().st_size
    assert size < 600 * PAGE_BYTES


@ON_SQLITE
async def test_no_connection_checkpoints_at_a_commit(database: Database) -> None:
    await write_pages(database, 1)
    async with database.read() as one, database.read() as two, database.write() as three:
        for conn in (one, two, three):
            assert (await conn.exec_driver_sql("PRAGMA wal_autocheckpoint")).scalar() == 0
            assert (await conn.exec_driver_sql("PRAGMA synchronous")).scalar() == 2


@ON_SQLITE
async def test_nobody_commits_during_a_checkpoint(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that begins the log anew beside a checkpoint is what damages a database."""
    await write_pages(database, 50)
    path = path_of(database)
    connect = sqlite3.connect
    with closing(connect(path, timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            checkpoint(path, 0)
        other.execute("ROLLBACK")
        seen: list[str] = []

        def try_to_write(statement: str) -> None:
            if "wal_checkpoint" in statement:
                try:
                    other.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    seen.append(str(error))

        def traced(*where: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*where, **options)
            connection.set_trace_callback(try_to_write)
            return connection

        monkeypatch.setattr(sqlite3, "connect", traced)
        assert checkpoint(path, 0)
    assert seen == ["database is locked"]
    assert log_pages(path) >= 50  # until the next commit, which begins it anew
    await write_pages(database, 1)
    assert log_pages(path) < 20


@ON_SQLITE
async def test_a_reader_of_an_old_state_delays_the_checkpoint_and_no_commit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "CHECKPOINT_PAGES", 50)
    monkeypatch.setattr(database_module, "CHECKPOINT_RETRY_SECONDS", 0.0)
    await write_pages(database, 1)
    async with database.read() as backup:
        await backup.execute(sa.text("SELECT count(*) FROM blobs"))
        for _ in range(5):
            await write_pages(database, 100)
        assert log_pages(path_of(database)) > 500
        rows = (await backup.execute(sa.text("SELECT count(*) FROM blobs"))).scalar()
        assert rows == 1
    for _ in range(2):
        await write_pages(database, 60)
    assert log_pages(path_of(database)) < 200


@ON_SQLITE
async def test_a_failed_checkpoint_fails_no_commit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "CHECKPOINT_PAGES", 10)

    def full(*_: Any) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(database_module, "checkpoint", full)
    await write_pages(database, 100)
    rows = await database.fetch(sa.text("SELECT count(*) FROM blobs"))
    assert rows[0][0] == 1


def start_writers(url: str, number: int) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen([sys.executable, "-c", WRITER, url, str(n)], stdout=subprocess.PIPE)
        for n in range(number)
    ]


@ON_SQLITE
@pytest.mark.e2e
async def test_another_process_takes_over_when_a_writer_is_killed(database: Database) -> None:
    await write_pages(database, 1)
    writers = start_writers(database.url.render_as_string(hide_password=False), 2)
    try:
        for turn in range(400):
            for writer in writers:
                assert writer.stdout is not None
                assert await asyncio.to_thread(writer.stdout.readline)
            assert log_pages(path_of(database)) < CHECKPOINT_PAGES + 1_000
            if turn == 200:
                os.kill(writers[0].pid, signal.SIGKILL)
                writers.pop(0).wait()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert (await database.fetch(sa.text("PRAGMA integrity_check")))[0][0] == "ok"


def test_versions_of_sqlite_with_the_bug_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, bad in {
        (3, 40, 1): True,
        (3, 44, 6): False,
        (3, 45, 0): True,
        (3, 50, 7): False,
        (3, 51, 2): True,
        (3, 51, 3): False,
        (3, 53, 0): False,
    }.items():
        monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
        assert bool(version_warning()) is bad, version


async def test_the_log_of_a_database_without_one_has_no_pages(tmp_path: Path) -> None:
    assert log_pages(tmp_path / "none.db") == 0
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/new.db")
    await migrate(database)
    assert 0 < log_pages(tmp_path / "new.db") < 200
    await database.close()
