"""Migrations of the database's schema."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from app.core.database import Database
from app.core.errors import SettingsError
from app.core.logging import get_logger
from app.core.settings import normalise_database_url

log = get_logger(__name__)

# Any number will do; all processes that migrate must use the same.
_ADVISORY_LOCK = 7_236_001


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
def head_revision() -> str:
    """The revision that this version of the service needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None  # noqa: S101 - there is always a first migration
    return head


def _revision(conn: sa.Connection) -> str | None:
    return MigrationContext.configure(conn).get_current_revision()


async def current_revision(database: Database) -> str | None:
    """The revision of the database; None for an empty one."""
    async with database.read() as conn:
        return await conn.run_sync(_revision)


async def migrate(database: Database, revision: str = "head") -> None:
    """Bring the database to a revision, in one transaction. Safe in concurrent processes."""
    async with database.write() as conn:
        if database.dialect == "postgresql":
            # On SQLite, BEGIN IMMEDIATE has the same effect.
            await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        await conn.run_sync(_migrate, revision)


def _migrate(conn: sa.Connection, revision: str) -> None:
    before = _revision(conn)
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


def upgrade(url: str) -> None:
    """Bring the database at `url` to the newest revision. Asynchronous code uses `migrate`."""

    async def run() -> None:
        database = Database(normalise_database_url(url))
        try:
            await migrate(database)
        finally:
            await database.close()

    asyncio.run(run())


async def schema_is_current(database: Database) -> bool:
    """Whether the database has the revision that this version needs."""
    return await current_revision(database) == head_revision()


async def ensure_schema(database: Database) -> None:
    """Migrate an SQLite database; on PostgreSQL check the revision only.

    Raises:
        SettingsError: the revision is unknown, or an operator has to migrate first.
    """
    revision = await current_revision(database)
    if revision == head_revision():
        return
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision is not None and revision not in known:
        raise SettingsError(
            f"the database is at revision {revision}, which this version does not know: "
            "it was written by a newer one"
        )
    if database.dialect == "postgresql":
        raise SettingsError(
            f"the database's schema is at {revision or 'nothing'}, needed is {head_revision()}: "
            "run `ncr db upgrade`"
        )
    await migrate(database)
