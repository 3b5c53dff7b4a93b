"""Restoring: whatever the two databases are, what was backed up is what is there, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from app.core.errors import NotFound
from app.transfer.archive import TransferError
from app.transfer.backup import write_backup
from app.transfer.table_io import decode, encode
from tests.app.trained_models import add_small_data, publish_model
from tests.app.transfer.support import UNICODE, Make, contents, fill, restored
from tests.conftest import BACKENDS

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize("target_kind", BACKENDS)
@pytest.mark.parametrize("source_kind", BACKENDS)
async def test_what_is_restored_is_what_was_backed_up(
    make: Make, tmp_path: Path, source_kind: str, target_kind: str
) -> None:
    path = tmp_path / "backup.zip"
    async with make(source_kind, "source") as source:
        filled = await fill(source)
        before = await contents(source)
        profile = await source.events.profiles.get(UNICODE)
        assert all(before.values()), [name for name, rows in before.items() if not rows]
        report = await write_backup(source, path)
        assert report.rows == {name: len(rows) for name, rows in before.items()}
        assert (report.models, report.missing) == (1, [])
        assert report.bytes == path.stat().st_size
    assert path.stat().st_mode & 0o077 == 0  # it holds what users did

    async with make(target_kind, "target") as target:
        own = (await contents(target))["instance"]
        await restored(target, path)
        after = await contents(target)
        assert after.pop("instance") == own != before.pop("instance")
        running = next(job for job in before["jobs"] if job["status"] == "running")
        ended = next(job for job in after["jobs"] if job["job_id"] == "running")
        assert ended["finished_at"] > 0
        running |= {"status": "failed", "error": "restored from a backup", "owner": None}
        running |= {"lease_until": None, "finished_at": ended["finished_at"]}
        assert after == before

        # It goes on from there.
        row = await target.models.get((await target.models.activation()).version or "")
        assert row.version == filled.version
        checkpoint = await target.models.load(row, "cpu")
        assert len(checkpoint.user_ids) == row.users
        assert target.models.candidates_path(row.version).read_bytes() == b"not looked into"
        same = await target.events.profiles.get(UNICODE)
        assert (same.last_seq, same.seen.tolist()) == (profile.last_seq, profile.seen.tolist())
        with pytest.raises(NotFound):
            await target.events.history("to be erased", None, 1)
        last = await target.events.last_seq()
        result = await target.events.add_rows([{"user": "later", "item": "later"}], 0)
        assert result.last_seq == last + 1 > max(event["seq"] for event in before["events"])
        later = await target.events.profiles.get("later")
        assert later.user_id is not None
        assert later.user_id > filled.erased_id
        assert later.seen[0] > max(item["id"] for item in before["items"])
        again = [{"event_id": "e-0", "user": UNICODE, "item": UNICODE, "type": "click",
                  "value": 1.5, "timestamp": 1_700_000_000.123456}]  # fmt: skip
        assert (await target.events.add_rows(again, 0)).duplicates == 1


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_database_that_holds_something_is_left_alone(
    backup: Path, make: Make, kind: str
) -> None:
    async with make(kind, "full") as services:
        await services.catalog.put("mine", {})
        before = await contents(services)
        with pytest.raises(TransferError, match="not empty, it has items"):
            await restored(services, backup)
        assert await contents(services) == before


async def test_checkpoints_that_are_there_already_stay_if_they_are_the_same(
    make: Make, tmp_path: Path
) -> None:
    """As when a service moves to another database and keeps its data folder."""
    path = tmp_path / "backup.zip"
    async with make("sqlite", "source") as source:
        await add_small_data(source)
        version = await publish_model(source)
        await write_backup(source, path)
        folder = source.models.folder(version)
        async with make("sqlite", "target") as target:
            place = target.models.folder(version)
            shutil.copytree(folder, place)
            weights = place / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"x")
            with pytest.raises(TransferError, match="differs from the backup"):
                await restored(target, path)
            assert (await contents(target))["users"] == []
            shutil.copy(folder / "model.safetensors", weights)
            await restored(target, path)
            await target.models.load(await target.models.get(version), "cpu")


def test_bytes_are_kept() -> None:
    """No table has any yet."""
    table = sa.Table("t", sa.MetaData(), sa.Column("b", sa.LargeBinary), sa.Column("j", sa.JSON))
    lines = encode(table, [(b"\x00\xff", {"a": None}), (None, None)])
    assert list(decode(list(table.c), lines.splitlines())) == [
        [[b"\x00\xff", '{"a":null}'], [None, None]]
    ]
