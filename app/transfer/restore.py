"""Restoring a backup into an empty service, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.all_tables import metadata
from app.core.bulk import insert_many
from app.core.migrations import head_revision
from app.core.tables import now_us
from app.transfer.archive import Backup, Report, TransferError, no_report, table_member
from app.transfer.checkpoints import unpack_checkpoints
from app.transfer.table_io import Rows, continue_ids_after, decode
from app.wiring import Services

MUST_BE_EMPTY = ("events", "users", "items", "models")
REPLACED = ("counters", "activation", "event_counts", "imports")
"""Tables of a new database whose rows the backup's rows replace."""
NOT_RESTORED = ("instance",)
"""The table of the database's instance id: a copy with the same id would share its caches."""
LOCK_SECONDS = 10

Columns = Sequence[str]


@dataclass(frozen=True)
class RestoreReport:
    """Counts of a restore."""

    rows: dict[str, int]
    """The number of rows by table."""
    models: int
    """Number of checkpoints."""
    ended_jobs: int
    """Jobs that were running when the backup was made, and that are now marked as failed."""


def check_fits(backup: Backup) -> None:
    """Raises TransferError unless the backup has the schema of this version."""
    manifest = backup.manifest
    if manifest.revision != head_revision():
        raise TransferError(
            f"{backup.path} is of schema {manifest.revision[:40]}, and this version has "
            f"{head_revision()}: restore it with the version that wrote it "
            f"({manifest.software[:40]}), then `ncr db upgrade`"
        )
    columns = {table.name: {column.name for column in table.c} for table in metadata.sorted_tables}
    stored = {name: set(entry.columns) for name, entry in manifest.tables.items()}
    if columns != stored or any(len(stored[n]) != len(manifest.tables[n].columns) for n in stored):
        raise TransferError(f"{backup.path} does not have the tables of its own schema")


async def restore_backup(
    services: Services, backup: Backup, report: Report = no_report
) -> RestoreReport:
    """Loads a verified backup in one transaction and puts its checkpoints in place.

    Raises:
        TransferError: the service is not empty or the backup does not fit; no table has changed.
        ForeignStore: the checkpoint store belongs to another database; no table has changed.
    """
    check_fits(backup)
    end_jobs = _EndRunningJobs()
    rows: dict[str, int] = {}
    async with services.database.write() as conn:
        await _lock(conn)
        await _refuse_unless_empty(conn)
        for table in metadata.sorted_tables:
            if table.name in NOT_RESTORED:
                continue
            if table.name in REPLACED:
                await conn.execute(table.delete())
            change = end_jobs if table.name == "jobs" else None
            rows[table.name] = await _load(conn, backup, table, change, report)
            await continue_ids_after(conn, table, backup.manifest.tables[table.name].last_id)
        # Whose checkpoints may be in the store already, as when only the database is new.
        versions = await conn.scalars(sa.select(metadata.tables["models"].c.version))
        await services.models.claim_store(versions.all(), required=False)
        # Before the commit, so that the active model has its checkpoint.
        models = await unpack_checkpoints(services, backup, report)
    await services.database.vacuum(metadata.sorted_tables)
    return RestoreReport(rows, models, end_jobs.count)


async def _lock(conn: AsyncConnection) -> None:
    """Blocks other writers until the end of the transaction.

    On SQLite, the transaction itself blocks other writers.
    """
    if conn.dialect.name == "postgresql":
        await conn.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        quote = conn.dialect.identifier_preparer.format_table
        names = ", ".join(quote(table) for table in metadata.sorted_tables)
        await conn.execute(sa.text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


async def _refuse_unless_empty(conn: AsyncConnection) -> None:
    revision = await conn.scalar(sa.text("SELECT version_num FROM alembic_version"))
    if revision != head_revision():
        raise TransferError(f"the database's schema is at {revision}, not at {head_revision()}")
    for name in MUST_BE_EMPTY:
        if await conn.scalar(sa.select(sa.exists().select_from(metadata.tables[name]))):
            raise TransferError(
                f"the database is not empty, because it has {name}: restore a backup into a "
                "new database"
            )


async def _load(
    conn: AsyncConnection,
    backup: Backup,
    table: sa.Table,
    change: Callable[[Columns, Rows], None] | None,
    report: Report,
) -> int:
    entry = backup.manifest.tables[table.name]
    columns = [table.c[name] for name in entry.columns]
    loaded = 0
    with backup.open(table_member(table.name)) as lines:
        chunks = decode(columns, lines)
        try:
            while rows := await asyncio.to_thread(next, chunks, None):
                if change is not None:
                    change(entry.columns, rows)
                await insert_many(conn, table, entry.columns, [tuple(row) for row in rows])
                loaded += len(rows)
                report(table.name, loaded, entry.rows)
        except (ValueError, TypeError, DBAPIError) as error:
            # Only the first line of a database error: the others repeat the row.
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise TransferError(
                f"{backup.path} cannot be restored: {table.name} after row {loaded}: {reason}"
            ) from None
    if loaded != entry.rows:
        raise TransferError(
            f"{backup.path} is damaged: {table.name} has {loaded} rows, not {entry.rows}"
        )
    return loaded


class _EndRunningJobs:
    """Marks running jobs as failed: their workers do not know this database."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, columns: Columns, rows: Rows) -> None:
        ended = {
            columns.index("status"): "failed",
            columns.index("error"): "restored from a backup",
            columns.index("finished_at"): now_us(),
            columns.index("owner"): None,
            columns.index("lease_until"): None,
        }
        status = columns.index("status")
        for row in rows:
            if row[status] == "running":
                for column, value in ended.items():
                    row[column] = value
                self.count += 1
