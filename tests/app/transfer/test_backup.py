"""Backups: what is in them and comes back, and damaged or foreign ones, which are refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from app.core.errors import NotFound
from app.core.tables import EVENT_SEQ, next_values
from app.transfer.archive import MANIFEST, Backup, TransferError
from app.transfer.backup import write_backup
from app.transfer.table_io import decode, encode
from tests.app.conftest import add_small_data, publish_model
from tests.app.transfer.conftest import (
    UNICODE,
    Make,
    contents,
    fill,
    refused,
    restored,
    rewritten,
    with_manifest,
)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_database_that_holds_something_is_left_alone(
    backup: Path, make: Make, kind: str
) -> None:
    async with make(kind, "full") as services:
        await services.catalog.put("mine", {})
        before = await contents(services)
        with pytest.raises(TransferError, match="not empty, because it has items"):
            await restored(services, backup)
        assert await contents(services) == before


@pytest.mark.slow
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


@pytest.mark.slow
def test_bytes_are_kept() -> None:
    """No table has any yet."""
    table = sa.Table("t", sa.MetaData(), sa.Column("b", sa.LargeBinary), sa.Column("j", sa.JSON))
    lines = encode(table, [(b"\x00\xff", {"a": None}), (None, None)])
    assert list(decode(list(table.c), lines.splitlines())) == [
        [[b"\x00\xff", '{"a":null}'], [None, None]]
    ]


async def test_any_damage_is_noticed(backup: Path, tmp_path: Path) -> None:
    with Backup(backup) as opened:
        opened.verify()
    content = backup.read_bytes()
    damaged = tmp_path / "damaged.zip"
    tables = content.index(b"tables/events.jsonl") + 40
    noticed = 0
    for at in [tables, *range(0, len(content), 37)]:
        damaged.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        # A bit of a time or a permission in the zip's own directory means nothing to us.
        try:
            with Backup(damaged) as opened:
                opened.verify()
        except TransferError:
            noticed += 1
        else:
            assert at != tables
    assert noticed > len(content) / 37 / 2
    for size in range(0, len(content), 101):
        damaged.write_bytes(content[:size])
        with pytest.raises(TransferError, match="cut short"):
            Backup(damaged)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"revision": "0001"}, "is of schema 0001"),
        ({"version": 2}, "of format 2"),
        ({"format": "other"}, "manifest is wrong at format"),
        ({"tables": {}}, "does not have the tables"),
        ({"members": {}}, "differs from its manifest"),
    ],
)
async def test_a_backup_of_something_else_is_refused(
    backup: Path, make: Make, kind: str, values: dict[str, Any], says: str
) -> None:
    await refused(make, kind, with_manifest(backup, **values), says)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_row_that_does_not_fit_undoes_everything(
    backup: Path, make: Make, kind: str
) -> None:
    """As no backup has them, only one that was tampered with."""
    with Backup(backup) as opened:
        tables = opened.manifest.model_dump()["tables"]
    tables["events"]["rows"] += 1
    await refused(make, kind, with_manifest(backup, tables=tables), "events has 50 rows, not 51")


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("line", [b"[1]\n", b"{}\n", b"[1,\n", b'["event_seq",null]\n'])
async def test_a_line_that_is_no_row_undoes_everything(
    backup: Path, make: Make, kind: str, line: bytes
) -> None:
    """The last one is refused by the database itself."""

    def change(members: dict[str, bytes]) -> None:
        manifest = orjson.loads(members[MANIFEST])
        manifest["members"]["tables/counters.jsonl"] = {
            "sha256": hashlib.sha256(line).hexdigest(), "bytes": len(line)
        }  # fmt: skip
        members |= {"tables/counters.jsonl": line, MANIFEST: orjson.dumps(manifest)}

    await refused(make, kind, rewritten(backup, change), "counters after row 0")


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "/etc/evil", "models/../../evil", "models/v/../../../evil", "models/.v/x",
        "evil", "models\\v\\x",
        "models/v/x/y", "tables/../evil.jsonl", "models/v/", "models/v/\x07",
    ],
)  # fmt: skip
async def test_names_that_lead_elsewhere_are_refused(
    backup: Path, make: Make, tmp_path: Path, name: str
) -> None:
    def add(members: dict[str, bytes]) -> None:
        manifest = orjson.loads(members[MANIFEST])
        sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        manifest["members"][name] = {"sha256": sha256, "bytes": 0}
        members |= {name: b"", MANIFEST: orjson.dumps(manifest)}

    before = set(tmp_path.rglob("*"))
    path = rewritten(backup, add)
    await refused(make, "sqlite", path, "has an unexpected member")
    assert not [path for path in set(tmp_path.rglob("*")) - before if "evil" in path.name]


async def test_a_name_twice_is_refused(backup: Path) -> None:
    with zipfile.ZipFile(backup, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("tables/users.jsonl", b"")
    with pytest.raises(TransferError, match="a repeated name"):
        Backup(backup)
