"""SQLite's write-ahead log: short whoever writes, and never checkpointed beside a commit."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from app.core import database as database_module
from app.core.database import CHECKPOINT_PAGES, Database
from app.core.migrations import migrate
from app.core.sqlite_file import checkpoint, log_pages, version_warning
from tests.conftest import ON_SQLITE

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
