"""Migrations of the database's schema, and the versions of the service that fit a schema."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from psycopg.errors import LockNotAvailable
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import AWAY, AdvisoryLock, Database, copy_of
from app.core.errors import SettingsError
from app.core.logging import get_logger
from app.core.settings import normalise_database_url
from app.core.tables import instance

log = get_logger(__name__)

_FIRST_RECORDED = "0006"
"""The first revision whose schema has a column for the oldest compatible revision."""

POLL_SECONDS = 0.2
LOCK_MILLISECONDS = 500
"""The time that a step on PostgreSQL waits for a table, and later requests wait for the step.

The time is below PostgreSQL's `deadlock_timeout` of 1 s. A step that takes tables in another order
than a request therefore gives way, and the request succeeds.
"""
MAX_LOCK_WAIT_SECONDS = 120.0
START_SECONDS = 30.0


def _script_location() -> Path:
    app = Path(__file__).resolve().parent.parent
    packaged = app / "_migrations"
    return packaged if packaged.is_dir() else app.parent / "migrations"


def _config() -> Config:
    config = Config()
    # Alembic's options go through configparser, to which a % in the path means something.
    config.set_main_option("script_location", str(_script_location()).replace("%", "%%"))
    return config


@lru_cache(maxsize=1)
def _scripts() -> dict[str, Script]:
    """The migrations of this version by their revisions, newest first."""
    walk = ScriptDirectory.from_config(_config()).walk_revisions()
    return {script.revision: script for script in walk}


def known_revisions() -> Collection[str]:
    """The revisions that this version has a migration for."""
    return _scripts().keys()


def head_revision() -> str:
    """The revision that this version of the service needs."""
    return next(iter(_scripts()))


def compatible_from(revision: str) -> str:
    """The oldest revision whose version of the service works with the schema of a revision."""
    return str(getattr(_scripts()[revision].module, "compatible_from", revision))


def record_compatibility(conn: sa.Connection, heads: Collection[str]) -> None:
    """Record in the database the oldest revision whose version works with the new schema."""
    for revision in heads:
        if revision >= _FIRST_RECORDED:
            conn.execute(instance.update().values(compatible_from=compatible_from(revision)))


def _revision(conn: sa.Connection) -> str | None:
    return MigrationContext.configure(conn).get_current_revision()


async def current_revision(database: Database) -> str | None:
    """The revision of the database; None for an empty database."""
    async with database.read() as conn:
        return await conn.run_sync(_revision)


async def schema_problem(database: Database) -> str | None:
    """The reason why this version cannot work with the database's schema; None if it can.

    A version works with its own schema, and with a newer schema that the database records as
    compatible.
    """
    revision = await current_revision(database)
    if revision is None or revision in _scripts():
        return None if revision == head_revision() else _outdated(revision)
    try:
        recorded = (await database.fetch(sa.select(instance.c.compatible_from)))[0][0]
    except (ProgrammingError, IndexError):
        recorded = None
    except OperationalError as error:  # SQLite's word for a missing column
        if "no such" not in str(error.orig):
            raise
        recorded = None
    return None if recorded in _scripts() else _unknown(revision)


def _outdated(revision: str | None) -> str:
    return (
        f"the schema of the database is at {revision or 'nothing'}, but this version needs "
        f"{head_revision()}: run `ncr db upgrade`"
    )


def _unknown(revision: str) -> str:
    return (
        f"the database is at revision {revision}, which this version does not know: a newer "
        "version wrote it"
    )


async def ensure_schema(database: Database, *, may_migrate: bool = True) -> None:
    """Migrate an SQLite database; on PostgreSQL check the revision only.

    Args:
        database: the database.
        may_migrate: also migrate an SQLite database with an older schema, not only an empty one.

    Raises:
        SettingsError: this version does not work with the newer schema, or an operator has to
            migrate first.
    """
    problem = await schema_problem(database)
    if problem is None:
        return
    revision = await current_revision(database)
    known = revision is None or revision in _scripts()
    if not known or database.dialect == "postgresql" or not (may_migrate or revision is None):
        raise SettingsError(problem)
    await migrate(database)


async def migrate(database: Database, revision: str = "head") -> None:
    """Migrate the database to a revision. Of concurrent processes one does the work.

    On SQLite the migration is one transaction, after a copy of the file. On PostgreSQL each step is
    a transaction, and requests continue: see `create_index_concurrently`.

    Raises:
        SettingsError: the copy cannot be written, or a table stays locked.
    """
    if database.dialect == "sqlite":
        # BEGIN IMMEDIATE keeps other processes out.
        async with database.write() as conn:
            before = await conn.run_sync(_revision)
            target = head_revision() if revision == "head" else revision
            if before not in (None, target):
                await _copy(Path(str(database.url.database)), str(before))
            await conn.run_sync(_migrate, revision)
        return
    async with _alone(database), database.read() as conn:
        try:
            await conn.exec_driver_sql(f"SET lock_timeout = {LOCK_MILLISECONDS}")
            await conn.commit()
            await _migrate_when_free(conn, revision)
        finally:
            await conn.invalidate()  # nobody else is to get it with its settings


async def _migrate_when_free(conn: AsyncConnection, revision: str) -> None:
    deadline = math.inf
    locked_at: str | None = None
    while True:
        try:
            await conn.run_sync(_migrate, revision)
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable):
                raise
            await conn.rollback()
            # An index that took minutes to build, or a step that is done, is no wait for a lock.
            at = await conn.run_sync(_revision)
            if deadline == math.inf or at != locked_at:
                deadline, locked_at = time.monotonic() + MAX_LOCK_WAIT_SECONDS, at
            if time.monotonic() > deadline:
                raise SettingsError(
                    f"other transactions kept a table locked for {MAX_LOCK_WAIT_SECONDS:g} s; "
                    "the earlier steps are done: run the command again"
                ) from None
            await conn.rollback()
            await asyncio.sleep(POLL_SECONDS)  # for those who waited behind it
        else:
            return


async def _copy(path: Path, revision: str) -> None:
    try:
        copy = await asyncio.to_thread(copy_of, path, revision)
    except (OSError, sqlite3.Error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise SettingsError(
            f"the schema is not migrated because the copy of {path} failed: {reason}"
        ) from None
    log.info("database copied before its migration", copy=str(copy))


@asynccontextmanager
async def _alone(database: Database) -> AsyncIterator[None]:
    """Keep other processes from migrating this PostgreSQL database within the context."""
    async with database.read() as conn:
        # By asking again and again, and outside a transaction: a building index waits for the
        # transactions of others, and so for a session that waits for this lock in one.
        await conn.execution_options(isolation_level="AUTOCOMMIT")
        take = sa.select(sa.func.pg_try_advisory_lock(AdvisoryLock.MIGRATION.value))
        while not await conn.scalar(take):  # noqa: ASYNC110 - the holder is another process
            await asyncio.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            await conn.execute(sa.select(sa.func.pg_advisory_unlock(AdvisoryLock.MIGRATION.value)))


def _migrate(conn: sa.Connection, revision: str) -> None:
    before = _revision(conn)
    if conn.dialect.name == "postgresql":
        conn.rollback()  # Alembic begins and ends a transaction for each step
    config = _config()
    config.attributes["connection"] = conn
    # There may be no steps left, if another process has just migrated.
    if revision == "base" or (revision != "head" and before is not None and revision < before):
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)
    after = _revision(conn)
    if after != before:
        log.info("schema migrated", before=before, after=after)
    if conn.dialect.name == "postgresql":
        conn.commit()


def create_index_concurrently(
    name: str, table: str, columns: Sequence[str], **options: Any
) -> None:
    """Create an index of a large table while other connections write. For migrations only.

    On PostgreSQL the function ends the transaction. A migration calls the function before all other
    work, so that an interrupted migration can be repeated. The function first removes the remains
    of an interrupted build.
    """
    context = op.get_context()
    if context.dialect.name == "sqlite":
        op.create_index(name, table, columns, **options)
        return
    with context.autocommit_block():
        conn = op.get_bind()
        query = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"
        valid = conn.scalar(sa.text(query), {"name": name})
        if valid:
            return
        # The build waits for the transactions of others, and nobody waits for it.
        conn.exec_driver_sql("SET lock_timeout = 0")
        if valid is False:
            op.drop_index(name, table, postgresql_concurrently=True)
        op.create_index(name, table, columns, postgresql_concurrently=True, **options)
        conn.exec_driver_sql(f"SET lock_timeout = {LOCK_MILLISECONDS}")


def upgrade(url: str) -> str:
    """Migrate the database at `url` to the newest revision, unless it has a newer compatible one.

    Returns:
        The revision that the database has now.

    Raises:
        SettingsError: this version does not work with the newer schema, or the migration fails as
            in `migrate`.
    """

    async def work(database: Database) -> str:
        if await current_revision(database) not in (None, *_scripts()):
            await ensure_schema(database)
        else:
            await migrate(database)
        return str(await current_revision(database))

    return asyncio.run(_with_database(url, work))


def downgrade(url: str, revision: str | None = None) -> str:
    """Migrate the database at `url` to an earlier revision, by default to the one before.

    Returns:
        The revision that the database has now.

    Raises:
        SettingsError: the database is empty or of an unknown revision, no earlier revision fits, or
            the migration fails as in `migrate`.
    """

    async def work(database: Database) -> str:
        current = await current_revision(database)
        if current is None:
            raise SettingsError("the database is empty and has no schema to downgrade")
        if current not in _scripts():
            raise SettingsError(f"{_unknown(current)}; use that version for the downgrade")
        target = revision or _scripts()[current].down_revision
        if target is None:
            raise SettingsError(f"no schema exists before {current}")
        if target not in known_revisions() or str(target) > current:
            older = ", ".join(sorted(known for known in _scripts() if known < current))
            raise SettingsError(
                f"the database is at {current}; the earlier schemas are {older or 'none'}"
            )
        await migrate(database, str(target))
        return str(target)

    return asyncio.run(_with_database(url, work))


async def _with_database(url: str, work: Any) -> str:
    database = Database(normalise_database_url(url))
    try:
        await wait_for_database(database)
        result: str = await work(database)
        return result
    finally:
        await database.close()


async def wait_for_database(database: Database, seconds: float = START_SECONDS) -> None:
    """Wait until PostgreSQL, which may be starting, answers. Raise its error after ``seconds``."""
    deadline = time.monotonic() + seconds
    while database.dialect == "postgresql":
        try:
            await database.ping()
        except AWAY as error:
            if time.monotonic() > deadline:
                raise
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            log.warning("the database does not answer, trying again", reason=reason)
            await asyncio.sleep(1)
        else:
            return
