"""Backups that are damaged, tampered with or of something else: refused, and nothing changes."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.transfer.archive import MANIFEST, Backup, TransferError
from tests.app.transfer.support import Make, refused, rewritten, with_manifest
from tests.conftest import BACKENDS

pytestmark = pytest.mark.anyio


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
        ({"members": {}}, "not what its manifest says"),
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
    await refused(make, "sqlite", path, "that no backup has")
    assert not [path for path in set(tmp_path.rglob("*")) - before if "evil" in path.name]


async def test_a_name_twice_is_refused(backup: Path) -> None:
    with zipfile.ZipFile(backup, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("tables/users.jsonl", b"")
    with pytest.raises(TransferError, match="a name twice"):
        Backup(backup)
