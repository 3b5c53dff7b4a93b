"""The index of events by item: dropped during a large import, and rebuilt after a killed import.

An import stores rows user by user, so the items of a commit lie all over this index. Of the indexes
of events, only this index costs more for each row as the table grows. The index makes queries
faster, but no query needs the index.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import AWAY, BULK_CHECKPOINT_PAGES, AdvisoryLock, Database
from app.core.logging import get_logger
from app.core.settings import normalise_database_url
from app.events.tables import events

log = get_logger(__name__)

CHECK_SECONDS = 60.0
_BUILD_MEMORY = "256MB"
_SESSION = (
    # Else the server would keep the lock of a machine that is cut off for hours.
    "tcp_keepalives_idle = 30",
    "tcp_keepalives_interval = 10",
    "tcp_keepalives_count = 3",
    # What is meant for requests would end each build.
    "statement_timeout = 0",
    "lock_timeout = 0",
)

_INDEX = next(index for index in events.indexes if index.name == "ix_events_item_id_user_id")
NAME = str(_INDEX.name)
_ON = f"{NAME} ON {events.name} ({', '.join(column.name for column in _INDEX.columns)})"
_EXISTS = {
    "sqlite": "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = :name)",
    # An interrupted build leaves one that is not valid.
    "postgresql": "SELECT EXISTS "
    "(SELECT FROM pg_index WHERE indexrelid = to_regclass(:name) AND indisvalid)",
}


class ItemIndex:
    """Drops and builds the index.

    A lock admits one process at a time. The death of the process frees the lock.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def exists(self) -> bool:
        """Return whether the index exists and is complete."""
        query = sa.text(_EXISTS[self._database.dialect])
        return bool((await self._database.fetch(query, {"name": NAME}))[0][0])

    @asynccontextmanager
    async def put_off(self, on_build: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Drop the index for the time of the context, call ``on_build``, and build the index.

        After an error, the index stays missing until `mend`. The context keeps the index
        while another process has the lock, or if the database role cannot drop the index.
        """
        async with self._alone() as conn:
            if conn is None:
                yield
                return
            try:
                await self._drop(conn)
                is_dropped = True
            except ProgrammingError as error:  # this role may not
                log.warning("this import keeps the index of events by item", reason=_reason(error))
                is_dropped = False
            if not is_dropped:
                yield
                return
            try:
                yield
            except BaseException:
                log.warning(
                    "the index of events by item is missing until `ncr db upgrade` or `ncr import`"
                )
                raise
            on_build()
            try:
                await self._build(conn)
            except AWAY as error:  # `mend` tries it again, by another connection
                log.warning("the index of events by item is not built", reason=_reason(error))

    async def mend(self) -> bool:
        """Build the index if it is missing, unless another process has the lock.

        Returns:
            Whether this call built the index.
        """
        if await self.exists():
            return False
        async with self._alone() as conn:
            if conn is None or await self.exists():
                return False
            log.warning("the index of events by item is missing; building the index")
            await self._build(conn)
            log.info("the index of events by item is built")
            return True

    async def keep(self) -> None:
        """Call `mend` every ``CHECK_SECONDS``: a killed import leaves the index missing."""
        while True:
            try:
                await self.mend()
            except (SQLAlchemyError, OSError) as error:
                log.warning(
                    "building the index of events by item failed; retrying", reason=_reason(error)
                )
            await asyncio.sleep(CHECK_SECONDS)

    async def _drop(self, conn: AsyncConnection | _Nobody) -> None:
        if isinstance(conn, AsyncConnection):
            await conn.exec_driver_sql(f"DROP INDEX CONCURRENTLY IF EXISTS {NAME}")
            return
        async with self._database.write(BULK_CHECKPOINT_PAGES) as writer:
            await writer.exec_driver_sql(f"DROP INDEX IF EXISTS {NAME}")

    async def _build(self, conn: AsyncConnection | _Nobody) -> None:
        if isinstance(conn, AsyncConnection):
            await self._drop(conn)  # what an interrupted build has left
            await conn.exec_driver_sql(f"SET maintenance_work_mem = '{_BUILD_MEMORY}'")
            await conn.exec_driver_sql(f"CREATE INDEX CONCURRENTLY {_ON}")
            return
        async with self._database.write() as writer:
            await writer.exec_driver_sql(f"CREATE INDEX IF NOT EXISTS {_ON}")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[AsyncConnection | _Nobody | None]:
        """Hold the lock, on PostgreSQL by the yielded connection; None: another process has it.

        The lock ends with the process. On PostgreSQL, the lock of a killed process stays until its
        running statement ends.
        """
        if self._database.dialect == "sqlite":
            # Not of the database's file: to close that would drop the locks that SQLite has on it.
            folder = os.open(Path(str(self._database.url.database)).parent, os.O_RDONLY)
            try:
                yield _NOBODY if _locked(folder) else None
            finally:
                os.close(folder)
            return
        async with self._database.read() as conn:
            # Outside a transaction: an index build waits for the transactions of others.
            await conn.execution_options(isolation_level="AUTOCOMMIT")
            try:
                for setting in _SESSION:
                    await conn.exec_driver_sql(f"SET {setting}")
                lock = sa.select(sa.func.pg_try_advisory_lock(AdvisoryLock.ITEM_INDEX.value))
                yield conn if await conn.scalar(lock) else None
            finally:
                with suppress(*AWAY):
                    await conn.invalidate()  # frees the lock; nobody gets it with its settings


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


class _Nobody:
    """Stands for a connection on SQLite, where the lock is on a folder."""


_NOBODY = _Nobody()


def _locked(folder: int) -> bool:
    """Lock a folder; return False if another process has the lock.

    On a system without locks of folders, the result is True.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network's file system without locks, on which SQLite has no place either
        return True
    return True


async def mend_at(url: str) -> bool:
    """Call `ItemIndex.mend` for the database at ``url``."""
    database = Database(normalise_database_url(url))
    try:
        return await ItemIndex(database).mend()
    finally:
        await database.close()
