"""Reading a backup back into an empty service: all of it, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.bulk import insert_many
from app.core.metadata import now_us
from app.core.migrations import head_revision
from app.schema import metadata
from app.services import Services
from app.transfer.archive import Backup, Report, TransferError, quietly, table_member
from app.transfer.checkpoints import unpack_checkpoints
from app.transfer.identities import go_on_after
from app.transfer.rows import Rows, decode

MUST_BE_EMPTY = ("events", "users", "items", "models")
REPLACED = ("counters", "activation")
"""Tables that a new database has rows of, in the place of which the backup's come."""
OWN = ("instance",)
"""What names the database itself: a copy that went by the same name would share its caches."""
LOCK_SECONDS = 10

Columns = Sequence[str]


@dataclass(frozen=True)
class RestoreReport:
    """What a restore brought back."""

    rows: dict[str, int]
    """By table."""
    models: int
    """Checkpoints that are in place."""
    ended_jobs: int
    """Jobs that ran when the backup was made, and have failed now."""


def check_fits(backup: Backup) -> None:
    """Raises TransferError unless the backup is of the schema that this version has."""
    manifest = backup.manifest
    if manifest.revision != head_revision():
        raise TransferError(
            f"{backup.path} is of schema {manifest.revision[:40]}, and this version has "
            f"{head_revision()}: restore it with the version that wrote it "
            f"({manifest.software[:40]}), then `ncr db upgrade`"
        )
    columns = {table.name: {column.name for column in table.c} for table in metadata.sorted_tables}
    found = {name: set(entry.columns) for name, entry in manifest.tables.items()}
    if columns != found or any(len(found[n]) != len(manifest.tables[n].columns) for n in found):
        raise TransferError(f"{backup.path} does not have the tables of its own schema")


async def restore_backup(
    services: Services, backup: Backup, report: Report = quietly
) -> RestoreReport:
    """Loads a verified backup in one transaction and puts its checkpoints in place.

    Raises TransferError, and changes no table, if the service holds anything already or the backup
    does not fit.
    """
    check_fits(backup)
    ended = _EndedJobs()
    rows: dict[str, int] = {}
    async with services.database.write() as conn:
        await _lock(conn)
        await _refuse_unless_empty(conn)
        for table in metadata.sorted_tables:
            if table.name in OWN:
                continue
            if table.name in REPLACED:
                await conn.execute(table.delete())
            change = ended if table.name == "jobs" else None
            rows[table.name] = await _load(conn, backup, table, change, report)
            await go_on_after(conn, table, backup.manifest.tables[table.name].last_id)
        # Before the commit: a model that is active has its checkpoint.
        models = await unpack_checkpoints(services, backup, report)
    return RestoreReport(rows, models, ended.count)


async def _lock(conn: AsyncConnection) -> None:
    """Keeps others from writing until the end. On SQLite the transaction does that already."""
    if conn.dialect.name == "postgresql":
        await conn.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        quote = conn.dialect.identifier_preparer.format_table
        names = ", ".join(quote(table) for table in metadata.sorted_tables)
        await conn.execute(sa.text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


async def _refuse_unless_empty(conn: AsyncConnection) -> None:
    for name in MUST_BE_EMPTY:
        if await conn.scalar(sa.select(sa.exists().select_from(metadata.tables[name]))):
            raise TransferError(
                f"the database is not empty, it has {name}: a backup is restored into a new one"
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
    done = 0
    with backup.open(table_member(table.name)) as lines:
        chunks = decode(columns, lines)
        try:
            while rows := await asyncio.to_thread(next, chunks, None):
                if change is not None:
                    change(entry.columns, rows)
                await insert_many(conn, table, entry.columns, [tuple(row) for row in rows])
                done += len(rows)
                report(table.name, done, entry.rows)
        except (ValueError, TypeError, DBAPIError) as error:
            # Of what a database says only the first line: the others repeat the row.
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise TransferError(
                f"{backup.path} cannot be restored: {table.name} after row {done}: {reason}"
            ) from None
    if done != entry.rows:
        raise TransferError(
            f"{backup.path} is damaged: {table.name} has {done} rows, not {entry.rows}"
        )
    return done


class _EndedJobs:
    """Ends jobs that were running: their workers have never seen this database."""

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
                for at, value in ended.items():
                    row[at] = value
                self.count += 1
