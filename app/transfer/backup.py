"""Writing a backup: every table in one state of the database, and the checkpoints of its models."""

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
from app.core.database import Database
from app.schema import metadata
from app.services import Services
from app.transfer.archive import (
    FORMAT,
    FORMAT_VERSION,
    ArchiveWriter,
    Manifest,
    Report,
    TableEntry,
    quietly,
    table_member,
)
from app.transfer.checkpoints import pack_checkpoint
from app.transfer.files import new_file
from app.transfer.identities import last_id
from app.transfer.rows import CHUNK, encode


@dataclass(frozen=True)
class BackupReport:
    """What a backup holds."""

    rows: dict[str, int]
    """By table."""
    models: int
    """Checkpoints that were packed."""
    missing: list[str]
    """Versions whose checkpoints should be there and are not, or damaged."""
    bytes: int
    """The size of the file."""


async def write_backup(services: Services, path: Path, report: Report = quietly) -> BackupReport:
    """Writes everything to a new file, which appears when it is whole.

    Servers may go on writing. Raises TransferError if the file is there already.
    """
    with new_file(path) as file:
        manifest, packed = await _write(services, file, report)
    return BackupReport(
        rows={name: entry.rows for name, entry in manifest.tables.items()},
        models=packed,
        missing=manifest.missing_models,
        bytes=path.stat().st_size,
    )


async def _write(services: Services, file: IO[bytes], report: Report) -> tuple[Manifest, int]:
    with ArchiveWriter(file) as archive:
        tables: dict[str, TableEntry] = {}
        async with _snapshot(services.database) as conn:
            revision = await conn.scalar(sa.text("SELECT version_num FROM alembic_version"))
            for table in metadata.sorted_tables:
                tables[table.name] = await _pack_table(conn, archive, table, report)
            kept = await _kept(conn)
        # The database has been let go of: a checkpoint never changes, and one that retention has
        # removed by now is named as missing.
        missing: list[str] = []
        for done, version in enumerate(kept, 1):
            if not await pack_checkpoint(services, archive, version):
                missing.append(version)
            report("models", done, len(kept))
        manifest = Manifest(
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
    return manifest, len(kept) - len(missing)


async def _kept(conn: AsyncConnection) -> Sequence[str]:
    models = metadata.tables["models"]
    query = sa.select(models.c.version).where(models.c.status != "deleted")
    return (await conn.scalars(query.order_by(models.c.version))).all()


@asynccontextmanager
async def _snapshot(database: Database) -> AsyncIterator[AsyncConnection]:
    """A connection whose reads all see one state of the database."""
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
        # In the order of the key: loading then appends to the indices.
        result = await conn.stream(
            sa.select(table).order_by(*table.primary_key), execution_options={"yield_per": CHUNK}
        )
        async for chunk in result.partitions():
            await asyncio.to_thread(lambda some: write(encode(table, some)), chunk)
            rows += len(chunk)
            report(table.name, rows, total)
    return TableEntry(
        columns=[column.name for column in table.c], rows=rows, last_id=await last_id(conn, table)
    )
