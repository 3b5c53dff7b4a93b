"""Writing a backup: a snapshot of every table, and the checkpoints of its models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app import __version__
from app.all_tables import metadata
from app.core.database import Database
from app.core.migrations import head_revision
from app.transfer.archive import (
    FORMAT,
    FORMAT_VERSION,
    ArchiveWriter,
    BackupManifest,
    Report,
    TableEntry,
    TransferError,
    new_file,
    no_report,
    table_member,
)
from app.transfer.checkpoints import pack_checkpoint
from app.transfer.table_io import CHUNK_ROWS, encode, last_id
from app.wiring import Services


@dataclass(frozen=True)
class BackupReport:
    """Counts of a backup."""

    rows: dict[str, int]
    """The number of rows by table."""
    models: int
    """Number of checkpoints."""
    missing: list[str]
    """Versions whose checkpoints are missing or damaged."""
    bytes: int
    """Size of the file, in bytes."""


async def write_backup(services: Services, path: Path, report: Report = no_report) -> BackupReport:
    """Writes a backup to a new file, which appears only when the file is whole.

    Servers may keep writing to the database meanwhile.

    Raises:
        TransferError: the file exists already, or the schema is of a newer version.
    """
    with new_file(path) as file:
        manifest, packed = await _write(services, file, report)
    return BackupReport(
        rows={name: entry.rows for name, entry in manifest.tables.items()},
        models=packed,
        missing=manifest.missing_models,
        bytes=path.stat().st_size,
    )


async def _write(services: Services, file: IO[bytes], report: Report) -> tuple[BackupManifest, int]:
    with ArchiveWriter(file) as archive:
        tables: dict[str, TableEntry] = {}
        async with _snapshot(services.database) as conn:
            revision = await conn.scalar(sa.text("SELECT version_num FROM alembic_version"))
            if revision != head_revision():
                raise TransferError(
                    f"the database's schema is at {revision}, but this version backs up only "
                    f"the schema {head_revision()}: make the backup with the version that "
                    "migrated the database"
                )
            for table in metadata.sorted_tables:
                tables[table.name] = await _pack_table(conn, archive, table, report)
            versions = await _stored_versions(conn)
        # Outside the snapshot: a checkpoint never changes, and one that retention has removed by
        # now is reported as missing.
        missing: list[str] = []
        for number, version in enumerate(versions, 1):
            if not await pack_checkpoint(services, archive, version):
                missing.append(version)
            report("models", number, len(versions))
        manifest = BackupManifest(
            format=FORMAT,
            version=FORMAT_VERSION,
            software=__version__,
            revision=str(revision),
            dialect=services.database.dialect,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=tables,
            missing_models=missing,
            members=archive.members,
        )
        archive.finish(manifest)
    return manifest, len(versions) - len(missing)


async def _stored_versions(conn: AsyncConnection) -> Sequence[str]:
    models = metadata.tables["models"]
    query = sa.select(models.c.version).where(models.c.status != "deleted")
    return (await conn.scalars(query.order_by(models.c.version))).all()


@asynccontextmanager
async def _snapshot(database: Database) -> AsyncIterator[AsyncConnection]:
    """A connection whose reads all see one snapshot of the database."""
    async with database.read() as conn:
        if database.dialect == "postgresql":
            await conn.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        yield conn


async def _pack_table(
    conn: AsyncConnection, archive: ArchiveWriter, table: sa.Table, report: Report
) -> TableEntry:
    total = (await conn.execute(sa.select(sa.func.count()).select_from(table))).scalar_one()
    rows = 0
    with archive.member(table_member(table.name)) as write:
        # In the order of the key, so that a restore appends to the indices.
        result = await conn.stream(
            sa.select(table).order_by(*table.primary_key),
            execution_options={"yield_per": CHUNK_ROWS},
        )
        async for chunk in result.partitions():
            await asyncio.to_thread(lambda part: write(encode(table, part)), chunk)
            rows += len(chunk)
            report(table.name, rows, total)
    return TableEntry(
        columns=[column.name for column in table.c], rows=rows, last_id=await last_id(conn, table)
    )
