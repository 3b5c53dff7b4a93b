"""Connections to the database, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.core.logging import get_logger

log = get_logger(__name__)

_BEGIN = "ncr_begin"
AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
"""Raised while the database cannot be reached, is busy or cannot write."""
BUSY_SECONDS = 10
RETRY_SECONDS = 0.02
HEAVY_READS = 4  # at a time, of the 20 connections
BULK_PAUSE_SECONDS = 0.11
# A commit of 50,000 events of all items changes up to 40,000 pages of 4 KB. Most are changed by the
# next one again: a checkpoint after every few commits writes them once.
_BULK_PRAGMAS = ("cache_size=-262144", "wal_autocheckpoint=65536")


class Database:
    """Connections for reading and for writing. `await close()` it when done."""

    def __init__(self, url: str, *, pool_size: int = 10) -> None:
        self.url = make_url(url)
        self.dialect: Literal["sqlite", "postgresql"] = (
            "sqlite" if self.url.get_backend_name() == "sqlite" else "postgresql"
        )
        options: dict[str, Any] = {
            "json_serializer": lambda value: orjson.dumps(value).decode(),
            # PostgreSQL writes 1e300 out as an integer; here it becomes the float again.
            "json_deserializer": orjson.loads,
            "pool_size": pool_size,
            # Values that clients sent stay out of errors, and so out of logs.
            "hide_parameters": True,
        }
        if self.dialect == "sqlite":
            assert self.url.database  # noqa: S101 - the settings refuse a database in memory
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            options["connect_args"] = {"isolation_level": None, "timeout": BUSY_SECONDS}
        else:
            options["pool_pre_ping"] = True
            # A server that is cut off without a word is given up within seconds.
            options["connect_args"] = {
                "connect_timeout": 5,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
            }
        self._engine = create_async_engine(self.url, **options)
        self.commits = 0
        """The number of transactions that this process has ended."""
        self._heavy_slots = asyncio.Semaphore(HEAVY_READS)
        # Within a process writers queue here: SQLite's own queue sleeps and retries, unfairly.
        self._write_lock = asyncio.Lock() if self.dialect == "sqlite" else None
        if self.dialect == "sqlite":
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
            self._reader = self._engine
            self._writer = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
            self._single = self._engine.execution_options(**{_BEGIN: ""})
        else:
            self._reader = self._writer = self._engine
            self._single = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading. On SQLite all its reads see one state of the database."""
        async with self._reader.connect() as conn:
            yield conn

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction: committed at the end, rolled back on an error."""
        try:
            if self._write_lock is None:
                async with self._writer.begin() as conn:
                    yield conn
            else:
                async with self._write_lock, self._writer.begin() as conn:
                    yield conn
        finally:
            # After an error too: a commit whose confirmation was lost is a commit.
            self.commits += 1

    @asynccontextmanager
    async def bulk_write(self) -> AsyncIterator[AsyncConnection]:
        """As `write`, for tens of thousands of rows: one of a row of such transactions.

        On SQLite the pages that they change stay in memory and in the log longer. Between two of
        them other processes get the lock: those that wait try it every 0.1 s only.
        """
        async with self.write() as conn:
            if self._write_lock is not None:
                for pragma in _BULK_PRAGMAS:
                    await conn.exec_driver_sql(f"PRAGMA {pragma}")
            yield conn
        if self._write_lock is not None:
            await asyncio.sleep(BULK_PAUSE_SECONDS)

    async def fetch(
        self, statement: sa.Executable, parameters: Mapping[str, Any] | None = None
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """The rows of one statement, outside any transaction: the fastest way to read."""
        async with self._single.connect() as conn:
            return (await conn.execute(statement, parameters)).all()

    async def fetch_heavy(
        self, statement: sa.Executable, seconds: float
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """The rows of a statement that may read a great many.

        Only a few run at a time, so that they never hold all connections; others wait for them.

        Args:
            statement: the statement.
            seconds: after which PostgreSQL ends it with an OperationalError. SQLite does not.
        """
        async with self._heavy_slots, self._reader.connect() as conn:
            if self.dialect == "postgresql":
                timeout = sa.func.set_config("statement_timeout", f"{seconds * 1000:.0f}", True)
                await conn.execute(sa.select(timeout))
            return (await conn.execute(statement)).all()

    def log_start(self) -> None:
        """Log which database this is; for SQLite also the version, as some versions have bugs."""
        if self.dialect == "sqlite":
            log.info("database", dialect="sqlite", sqlite=sqlite3.sqlite_version)
        else:
            log.info("database", dialect="postgresql", host=self.url.host)

    async def ping(self) -> None:
        """Raise if the database cannot be reached."""
        await self.fetch(sa.text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    _use_wal(connection, cursor)
    for pragma in (
        f"busy_timeout={BUSY_SECONDS * 1000}",
        # An acknowledged event survives a power cut; NORMAL would only survive a crash.
        "synchronous=FULL",
        # In pages of 4 KB. A thousand events change 1,700 of them: by the default of 1,000 each
        # such commit would be followed by a checkpoint, which writes and syncs it all once more.
        "wal_autocheckpoint=8000",
        "foreign_keys=ON",
        "cache_size=-65536",
        "temp_store=MEMORY",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _use_wal(connection: Any, cursor: Any) -> None:
    """Change to WAL, with retries while other processes open the same new database.

    SQLite refuses at once, whatever the busy timeout: two processes that wait for each other's
    shared lock would wait for ever.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            connection.run_async(lambda _: asyncio.sleep(RETRY_SECONDS))
        else:
            return


def _begin_sqlite(conn: sa.Connection) -> None:
    # The driver would begin late and deferred: two that read, then write, would both succeed in
    # reading and one write would be lost or refused. A writer takes the lock before it reads.
    begin = conn.get_execution_options().get(_BEGIN, "BEGIN")
    if begin:
        conn.exec_driver_sql(begin)
