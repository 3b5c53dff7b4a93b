"""Connections to the database, on SQLite and on PostgreSQL, and SQLite's file with its log."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sqlite3
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from enum import IntEnum, unique
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.core.logging import get_logger

log = get_logger(__name__)


@unique
class AdvisoryLock(IntEnum):
    """The advisory locks of the service on PostgreSQL. Each lock has one purpose."""

    MIGRATION = 7_236_001
    ITEM_INDEX = 7_236_002
    TRIAL_LISTS = 7_236_003
    SHOWN_LISTS = 7_236_004


_BEGIN = "ncr_begin"
AWAY = (OperationalError, InterfaceError, PoolTimeoutError)
"""The errors while the database cannot be reached, is busy or cannot write."""
BUSY_SECONDS = 10
RETRY_SECONDS = 0.02
CHECKPOINT_PAGES = 8_000
"""Pages of 4 KiB in SQLite's write-ahead log after which a checkpoint copies the log into the
database. A commit of 1,000 events changes 1,700 pages. With SQLite's default of 1,000 pages, each
of these commits would cause a checkpoint, which writes and syncs all pages once more."""
CHECKPOINT_RETRY_SECONDS = 1.0
MAX_LOG_BYTES = 64 * 2**20
"""The length to which SQLite cuts its log when the log begins anew, as after a long backup."""
WRITER_CACHE_KIB = 64 * 1024
READER_CACHE_KIB = 8 * 1024
"""SQLite's page caches: of the writing connection, and of each of up to 20 reading connections."""
HEAVY_READS = 4  # at a time, of the 20 connections
BULK_PAUSE_SECONDS = 0.11
# A commit of 50,000 events of all items changes up to 40,000 pages. Most are changed by the next
# one again: a checkpoint after every few commits writes them once.
BULK_CHECKPOINT_PAGES = 65_536
BULK_CACHE_KIB = 256 * 1024


class Database:
    """Connections for reading and for writing. Await `close()` when done."""

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
            options["connect_args"] = {
                "isolation_level": None,
                "timeout": BUSY_SECONDS,
                "factory": _Connection,
            }
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
        self._reader = self._writer = create_async_engine(self.url, **options)
        self.commits = 0
        """The number of write transactions that this process has ended, failed ones included."""
        self._heavy_slots = asyncio.Semaphore(HEAVY_READS)
        # Within a process writers queue here: SQLite's own queue sleeps and retries, unfairly.
        self._write_lock = asyncio.Lock() if self.dialect == "sqlite" else None
        self._checkpointed_at = -math.inf
        if self.dialect == "sqlite":
            # One writer, as there is one lock. A large transaction needs a large cache.
            writer = create_async_engine(self.url, **options | {"pool_size": 1, "max_overflow": 0})
            for engine, cache in ((self._reader, READER_CACHE_KIB), (writer, WRITER_CACHE_KIB)):
                event.listen(engine.sync_engine, "connect", partial(_prepare_sqlite, cache))
                event.listen(engine.sync_engine, "begin", _begin_sqlite)
            self._writer = writer.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
            self._single = self._reader.execution_options(**{_BEGIN: ""})
        else:
            event.listen(self._reader.sync_engine, "connect", _prepare_postgresql)
            self._single = self._reader.execution_options(isolation_level="AUTOCOMMIT")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading. On SQLite all its reads see one state of the database."""
        async with self._reader.connect() as conn:
            yield conn

    @asynccontextmanager
    async def write(self, checkpoint_pages: int | None = None) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction, which commits at the end and rolls back on an error.

        On SQLite a checkpoint follows once the log has ``checkpoint_pages`` pages, by default
        ``CHECKPOINT_PAGES``.
        """
        try:
            if self._write_lock is None:
                async with self._writer.begin() as conn:
                    yield conn
            else:
                async with self._write_lock:
                    async with self._writer.begin() as conn:
                        yield conn
                    await self._checkpoint(checkpoint_pages or CHECKPOINT_PAGES)
        finally:
            # After an error too: a commit whose confirmation was lost is a commit.
            self.commits += 1

    @asynccontextmanager
    async def bulk_write(self) -> AsyncIterator[AsyncConnection]:
        """As `write`, for one of many transactions of tens of thousands of rows each.

        On SQLite the changed pages stay in memory and in the log longer. A pause after each
        transaction gives the lock to other processes, which try the lock every 0.1 s only.
        """
        try:
            async with self.write(BULK_CHECKPOINT_PAGES) as conn:
                if self._write_lock is not None:
                    await conn.exec_driver_sql(f"PRAGMA cache_size=-{BULK_CACHE_KIB}")
                yield conn
        finally:
            if self._write_lock is not None:
                await asyncio.sleep(BULK_PAUSE_SECONDS)

    async def vacuum(self, tables: Iterable[sa.Table]) -> None:
        """Vacuum and analyze tables of PostgreSQL at once, as after a bulk load.

        PostgreSQL itself does so minutes later. The planner then has statistics, without which a
        list can take 100 times as long. Scans of an index alone become possible: a count of
        popularity takes a tenth of the time. SQLite does not need the call. If the role lacks
        the permission, the tables stay unchanged.
        """
        if self.dialect == "postgresql":
            try:
                async with self._single.connect() as conn:
                    for table in tables:
                        await conn.exec_driver_sql(f"VACUUM (ANALYZE) {table.name}")
            except DBAPIError as error:
                reason = str(error.orig).partition("\n")[0]
                log.warning("the vacuum of the tables failed", reason=reason)

    async def _checkpoint(self, pages: int) -> None:
        """Keep SQLite's log at about ``pages`` pages.

        Each process does so after its own commits. A process for checkpoints is not necessary.
        """
        path = Path(str(self.url.database))
        if (
            time.monotonic() < self._checkpointed_at + CHECKPOINT_RETRY_SECONDS
            or log_pages(path) < pages
        ):
            return
        try:
            whole = await asyncio.to_thread(checkpoint, path, BUSY_SECONDS)
        except sqlite3.OperationalError as error:
            whole = False  # the commit is done, whatever comes of this
            log.warning("the checkpoint of the write-ahead log failed", error=str(error))
        # What readers of older states prevent is not tried again at each commit.
        self._checkpointed_at = -math.inf if whole else time.monotonic()

    async def fetch(
        self, statement: sa.Executable, parameters: Mapping[str, Any] | None = None
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """The rows of one statement, outside any transaction: the fastest way to read."""
        async with self._single.connect() as conn:
            return (await conn.execute(statement, parameters)).all()

    async def fetch_heavy(
        self, statement: sa.Executable, seconds: float
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """The rows of an expensive statement.

        At most ``HEAVY_READS`` of these statements run at a time, so that they never hold all
        connections. Further statements wait.

        Args:
            statement: the statement.
            seconds: the time after which PostgreSQL ends the statement with an OperationalError.
                SQLite has no such limit.
        """
        async with self._heavy_slots, self._reader.connect() as conn:
            if self.dialect == "postgresql":
                timeout = sa.func.set_config("statement_timeout", f"{seconds * 1000:.0f}", True)
                await conn.execute(sa.select(timeout))
            return (await conn.execute(statement)).all()

    def log_start(self) -> None:
        """Log the dialect and PostgreSQL's host or SQLite's version, as some versions have bugs."""
        if self.dialect == "sqlite":
            log.info("database", dialect="sqlite", sqlite=sqlite3.sqlite_version)
        else:
            log.info("database", dialect="postgresql", host=self.url.host)

    def log_warning(self) -> None:
        """Log the `warning`, if any. For servers and workers, as each command would repeat it."""
        if self.warning is not None:
            log.warning(self.warning, sqlite=sqlite3.sqlite_version)

    @property
    def warning(self) -> str | None:
        """A warning for operators about the database's version; None without one."""
        return version_warning() if self.dialect == "sqlite" else None

    async def ping(self) -> None:
        """Raise if the database cannot be reached."""
        await self.fetch(sa.text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self._reader.dispose()
        if self._writer is not self._reader:
            await self._writer.dispose()


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    # The compiler takes longer, 0.1 s, than a query of a request, and tables without statistics
    # make the planner expect a long one.
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SET jit = off")
    connection.autocommit = False


def _prepare_sqlite(cache_kib: int, connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    _use_wal(connection, cursor)
    for pragma in (
        f"busy_timeout={BUSY_SECONDS * 1000}",
        # An acknowledged event survives a power cut; NORMAL would only survive a crash.
        "synchronous=FULL",
        # Never at a commit, beside commits of other processes: see `checkpoint`.
        "wal_autocheckpoint=0",
        f"journal_size_limit={MAX_LOG_BYTES}",
        "foreign_keys=ON",
        f"cache_size=-{cache_kib}",
        "temp_store=MEMORY",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _use_wal(connection: Any, cursor: Any) -> None:
    """Change to WAL, with retries while other processes open the same new database.

    SQLite refuses at once in spite of the busy timeout, because two processes that wait for each
    other's shared lock would never end.
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


MAX_COPIES = 2
_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


def version_warning() -> str | None:
    """The warning about this version of SQLite; None if the version does not have the bug."""
    version = sqlite3.sqlite_version_info
    # Fixed in 3.51.3, and in the last releases of two older series.
    if version >= (3, 51, 3) or (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51):
        return None
    return (
        "this version of SQLite has a rare bug that can damage the database when another program "
        "writes to it; use 3.51.3 or later"
    )


def log_pages(database: Path) -> int:
    """The number of pages in the write-ahead log since the log last began anew.

    The file keeps its length when the log begins anew, so its length does not tell the number of
    pages. Frames of the present log have the salt of the file's header, and precede the remaining
    frames of an older log (https://www.sqlite.org/fileformat2.html#walformat).
    """
    try:
        with Path(f"{database}-wal").open("rb", buffering=0) as file:
            header = file.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                return 0
            frame_bytes = _FRAME_HEADER_BYTES + int.from_bytes(header[8:12], "big")
            frames = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // frame_bytes

            def is_old(frame: int) -> bool:
                salt = os.pread(file.fileno(), 8, _HEADER_BYTES + frame * frame_bytes + 8)
                return salt != header[16:24]

            return bisect_left(range(frames), True, key=is_old)
    except FileNotFoundError:
        return 0


class _Connection(sqlite3.Connection):
    """A connection to SQLite that holds no lock once it is closed.

    SQLite keeps a closed connection while one of its statements has rows left, and with it the lock
    of the transaction. A task that is cancelled leaves such a statement to the garbage collector.
    """

    def close(self) -> None:
        if self.in_transaction:
            with suppress(sqlite3.Error):
                self.rollback()
        super().close()


def checkpoint(database: Path, busy_seconds: float) -> bool:
    """Copy the write-ahead log into the database while no connection can write. The call blocks.

    Before SQLite 3.51.3 a commit of one connection during a checkpoint of another can damage the
    database. A connection that writes nothing therefore holds the write lock. The lock excludes
    commits of all processes, and other checkpoints by this function.

    Returns:
        Whether the whole log was copied. Readers of older states prevent that.

    Raises:
        sqlite3.OperationalError: another connection holds the lock for longer than
            ``busy_seconds``, or the disk fails.
    """
    with (
        closing(sqlite3.connect(database, timeout=busy_seconds, isolation_level=None)) as lock,
        closing(sqlite3.connect(database, isolation_level=None)) as connection,
    ):
        lock.execute("BEGIN IMMEDIATE")
        busy, pages, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        lock.execute("ROLLBACK")
    return not busy and pages == copied


def copy_of(database: Path, revision: str) -> Path:
    """Copy the database with its write-ahead log, and keep only the ``MAX_COPIES`` newest copies.

    Raises:
        OSError, sqlite3.Error: the copy cannot be written.
    """
    target = database.with_name(f"{database.name}.{revision}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    part = target.with_name(f"{target.name}.part")
    try:
        # It holds all that the database does: only its owner may read it.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)
        part.rename(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    name = re.compile(rf"{re.escape(database.name)}\.\d{{4}}-(\d{{8}}-\d{{6}}-\d{{6}})(\.part)?")
    found = [match for path in database.parent.iterdir() if (match := name.fullmatch(path.name))]
    whole = sorted((match for match in found if not match[2]), key=lambda match: match[1])
    # Whoever left a part has ended: two processes never migrate at a time.
    for match in [*whole[:-MAX_COPIES], *(match for match in found if match[2])]:
        database.with_name(match[0]).unlink()
    return target
