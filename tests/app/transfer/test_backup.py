"""Writing a backup: of one moment, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from app.core.tables import EVENT_SEQ, next_values
from app.transfer.archive import Backup, TransferError
from app.transfer.backup import write_backup
from app.transfer.table_io import encode
from tests.app.trained_models import add_small_data, publish_model
from tests.app.transfer.support import Make, contents, restored
from tests.conftest import BACKENDS

pytestmark = pytest.mark.anyio


async def test_an_existing_file_is_not_overwritten(backup: Path, make: Make) -> None:
    content = backup.read_bytes()
    async with make("sqlite", "another") as services:
        with pytest.raises(TransferError, match="exists already"):
            await write_backup(services, backup)
    assert backup.read_bytes() == content


async def test_a_backup_that_fails_leaves_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr("app.transfer.backup.encode", fail)
    async with make("sqlite", "failing") as services:
        with pytest.raises(OSError, match="disk full"):
            await write_backup(services, tmp_path / "out" / "backup.zip")
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_model_without_its_checkpoint_is_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "backup.zip"
    async with make("sqlite", "source") as source:
        await add_small_data(source)
        version = await publish_model(source)
        shutil.rmtree(source.models.folder(version))
        report = await write_backup(source, path)
        assert (report.models, report.missing) == (0, [version])
    with Backup(path) as backup:
        assert backup.manifest.missing_models == [version]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_backup_while_others_write_is_of_one_moment(
    make: Make, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "backup.zip"
    async with make(kind, "source") as source:
        number = 0

        def encode_late(table: sa.Table, rows: Sequence[Sequence[Any]]) -> bytes:
            """Not before somebody has written once more."""
            before, until = number, time.monotonic() + 20
            while number <= before + 1 and time.monotonic() < until:
                time.sleep(0.001)
            return encode(table, rows)

        monkeypatch.setattr("app.transfer.backup.CHUNK_ROWS", 50)
        monkeypatch.setattr("app.transfer.backup.encode", encode_late)

        async def write(some: int) -> None:
            nonlocal number
            for _ in range(some):
                number += 1
                rows = [{"user": f"u{number}", "item": f"i{number}-{n}"} for n in range(5)]
                await source.events.add_rows(rows, 0)

        async def write_on() -> None:
            while True:
                await write(1)
                await source.events.delete_user(f"u{number - 3}")

        await write(60)
        writing = asyncio.create_task(write_on())
        try:
            report = await asyncio.wait_for(write_backup(source, path), 60)
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
        written = await source.events.last_seq()
    async with make(kind, "target") as target:
        await restored(target, path)
        rows = await contents(target)
        users = {row["id"] for row in rows["users"]}
        items = {row["id"] for row in rows["items"]}
        assert {row["user_id"] for row in rows["events"]} == users
        assert {row["item_id"] for row in rows["events"]} <= items
        last = {row["name"]: row["value"] for row in rows["counters"]}[EVENT_SEQ]
        assert written > last >= 300  # somebody did write, or nothing was tested
        assert len(rows["events"]) == report.rows["events"]
        seqs = [row["seq"] for name in ("events", "retractions") for row in rows[name]]
        # An erased user's events are gone, and a number more was taken for the erasing.
        erased = len(rows["retractions"])
        assert max(seqs) == last
        assert len(rows["events"]) + 6 * erased == last
        async with target.database.write() as conn:
            assert await next_values(conn, EVENT_SEQ) == last + 1
