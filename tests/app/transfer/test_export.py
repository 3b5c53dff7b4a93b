"""Exports: what is written, and that an import of it makes the same service again."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import orjson
import pytest

from app.core.errors import NotFound
from app.events.schemas import NewEvent, StoredEvent
from app.events.user_schemas import User
from app.transfer.archive import TransferError
from app.transfer.export import export
from app.transfer.import_data import import_preferences, import_source, import_users
from app.wiring import Services, build_services
from ncr_core.data.readers import BadRow, open_source
from ncr_core.errors import DataError
from tests.app.conftest import SMALL, add_small_data

pytestmark = pytest.mark.anyio

ODD_IDS = [
    "a,b",
    'quo"te',
    "line\nfeed",
    "cr\rlf\r\n",
    " space ",
    "東京/é",
    "=1+1",
    "a;b\tc|d",
    "'",
]


async def fill(services: Services) -> None:
    await add_small_data(services)
    rows = [
        {"event_id": f"odd-{n}", "user": user, "item": ODD_IDS[-n],
         "type": ["click", "dislike", 'a "type", odd'][n % 3],
         "value": [None, 0.1, -1e300][n % 3], "timestamp": 1_700_000_000.654321 + n,
         "recommendation_id": [None, "r,\n1"][n % 2]}
        for n, user in enumerate(ODD_IDS)
    ]  # fmt: skip
    assert (await services.events.add_rows(rows, 0)).accepted == len(ODD_IDS)
    await services.catalog.put(
        ODD_IDS[0],
        {"title": 'A "title", odd', "hidden": True, "categories": ["one|two", "three"],
         "attributes": {"title": "not the title", "item": 5, "deep": {"x": [None, "", 1.5]}}},
    )  # fmt: skip
    await services.catalog.put("unused", {"categories": [], "embedding": [0.1, -3, 2e-7]})
    stated = [
        {"user": user, "winner": ODD_IDS[n], "loser": ODD_IDS[n - 1], "timestamp": n + 0.5}
        for n, user in enumerate([*ODD_IDS, "only stated"][-len(ODD_IDS) :])
    ]
    assert (await services.events.add_preferences([*stated, stated[0]], 0)).accepted == len(
        ODD_IDS
    ) + 1
    told = {"attributes": {"age": 7, "deep": {"x": [None, ""]}}}
    for user in (ODD_IDS[2], "only described"):
        await services.users.put(user, told)
    await services.users.put("nothing said", {})
    await services.catalog.put("deleted", {"title": "Deleted"})
    await services.catalog.delete("deleted")


async def everything(services: Services) -> tuple[list[object], ...]:
    """Events without what an import gives them anew, items, users, and what they stated."""

    def known(event: StoredEvent, user: str, item: str) -> object:
        return user, item, event.type, event.value, event.timestamp

    events = [known(*row) async for chunk in services.events.iter_events() for row in chunk]
    items = [item.as_json() async for chunk in services.catalog.iter_items() for item in chunk]
    stated = {row async for chunk in services.events.iter_preferences() for row in chunk}
    assert len(stated) == len(ODD_IDS)
    items.sort(key=lambda item: str(item["id"]))
    users = [(user.id, user.attributes) for user in await described(services)]
    return sorted(events, key=repr), [*items], sorted(stated), sorted(users)


async def described(services: Services) -> list[User]:
    """Users with attributes, a chunk each."""
    return [user async for chunk in services.users.iter_described(1) for user in chunk]


async def test_an_imported_export_is_the_same_service(
    services: Services, tmp_path: Path, sqlite_template: Path
) -> None:
    await fill(services)
    folder = tmp_path / "some" / "export"
    report = await export(services, folder)
    assert report.events == len(SMALL.interactions) + len(ODD_IDS)
    assert report.preferences == len(ODD_IDS) + 1
    assert report.users == 2
    names = {"events.csv", "items.jsonl", "preferences.csv", "users.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0

    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(sqlite_template, other / "ncr.db")
    settings = services.settings.model_copy(
        update={"data_dir": other, "database_url": f"sqlite+aiosqlite:///{other / 'ncr.db'}"}
    )
    target = await build_services(settings)
    try:
        bad: list[BadRow] = []
        done = await import_source(
            target, open_source(folder), on_bad=bad.append, on_bytes=lambda n: None
        )
        assert (bad, done.accepted, done.items) == ([], report.events, report.items)
        for known in (0, len(ODD_IDS) + 1):
            told = await import_preferences(target, folder, on_bad=bad.append)
            # One was stated twice, at one time.
            assert (bad, told.accepted) == ([], 0 if known else len(ODD_IDS))
            assert told.duplicates == (known or 1)
            assert await import_users(target, folder, on_bad=bad.append) == (0 if known else 2)
        assert await everything(target) == await everything(services)
    finally:
        await target.close()


async def test_the_columns_of_an_event(services: Services, tmp_path: Path) -> None:
    await services.events.add_rows(
        [
            {"event_id": "x", "user": "ann", "item": "i", "type": "buy", "value": 0.1,
             "timestamp": "2026-01-02T03:04:05+01:00", "recommendation_id": "r"},
            {"event_id": "y", "user": "ann", "item": "i", "timestamp": 0.000001},
        ],
        0,
    )  # fmt: skip
    await export(services, tmp_path / "out")
    assert (tmp_path / "out" / "events.csv").read_text() == (
        "event_id,user,item,type,value,timestamp,recommendation_id\n"
        "x,ann,i,buy,0.1,2026-01-02T02:04:05.000000Z,r\n"
        "y,ann,i,interaction,,1970-01-01T00:00:00.000001Z,\n"
    )
    lines = (tmp_path / "out" / "items.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line) for line in lines] == [
        {"item": "i", "title": None, "categories": [], "hidden": False, "attributes": {}}
    ]


async def test_the_events_of_one_user(services: Services, tmp_path: Path) -> None:
    await fill(services)
    user = ODD_IDS[2]
    report = await export(services, tmp_path / "out", user=user)
    assert (report.events, report.items, report.preferences) == (1, 0, 1)
    names = {"events.csv", "preferences.csv", "users.jsonl"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    (line,) = (tmp_path / "out" / "users.jsonl").read_bytes().splitlines()
    assert orjson.loads(line) == {"user": user, "attributes": {"age": 7, "deep": {"x": [None, ""]}}}
    with (tmp_path / "out" / "preferences.csv").open(newline="") as file:
        (stated,) = csv.DictReader(file)
    assert stated == {
        "user": user,
        "winner": ODD_IDS[1],
        "loser": ODD_IDS[0],
        "timestamp": "1970-01-01T00:00:01.500000Z",
    }
    with (tmp_path / "out" / "events.csv").open(newline="") as file:
        assert [(row["user"], row["event_id"]) for row in csv.DictReader(file)] == [(user, "odd-2")]
    # Erased, there is nothing of them to be exported.
    await services.events.delete_user(user)
    with pytest.raises(NotFound, match="the user does not exist"):
        await export(services, tmp_path / "later", user=user)
    assert not (tmp_path / "later").exists() or not list((tmp_path / "later").iterdir())
    await export(services, tmp_path / "rest")
    assert "odd-2" not in (tmp_path / "rest" / "events.csv").read_text()
    assert len((tmp_path / "rest" / "users.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.slow
async def test_chunks_leave_nothing_out(services: Services) -> None:
    await services.catalog.upsert_rows([{"id": item.id} for item in SMALL.items])
    events = [NewEvent(f"e{n}", u, i) for n, (u, i, _) in enumerate(SMALL.interactions[:60])]
    await services.events.import_rows(events)
    for chunk in (1, 7, 10_000):
        seqs = [
            row[0].seq
            async for rows in services.events.iter_events(chunk_size=chunk)
            for row in rows
        ]
        assert seqs == list(range(1, len(events) + 1))
        items = [item.id async for rows in services.catalog.iter_items(chunk) for item in rows]
        assert items == [item.id for item in SMALL.items]


async def test_nothing_is_overwritten(services: Services, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "events.csv").write_text("mine")
    with pytest.raises(TransferError, match="exists already"):
        await export(services, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["events.csv"]
    assert (tmp_path / "out" / "events.csv").read_text() == "mine"


async def test_an_empty_service(services: Services, tmp_path: Path) -> None:
    report = await export(services, tmp_path / "out")
    assert (report.events, report.items) == (0, 0)
    assert (tmp_path / "out" / "events.csv").read_text().count("\n") == 1


async def test_preferences_that_cannot_be_imported(services: Services, tmp_path: Path) -> None:
    await services.events.add_rows([{"user": "x", "item": item} for item in "ab"], 0)
    assert (await import_preferences(services, tmp_path, on_bad=print)).accepted == 0
    path = tmp_path / "preferences.csv"
    path.write_text(
        "user,winner,loser,timestamp\nu,a,b,\nu,a,a,2026-01-01\nu,a,nix,2026-01-01\n,a,b,2026-01-01\nu,b,a,soon\nu,b,a,7,8\n"
        "v,b,a,2026-01-01\n"
    )
    bad: list[BadRow] = []
    found = await import_preferences(services, tmp_path, on_bad=bad.append)
    assert found.accepted == 2
    assert sorted((row.line, row.reason) for row in bad) == [
        (3, "winner and loser must be different items"),
        (4, "unknown item 'nix'"),
        (5, "user is missing"),
        (6, "timestamp must be ISO-8601 or epoch seconds"),
        (7, "unknown field 'None'"),
    ]
    path.write_bytes(b"user,winner,loser\n\xff,a,b\n")
    with pytest.raises(DataError, match=r"preferences\.csv cannot be read"):
        await import_preferences(services, tmp_path, on_bad=bad.append)


async def test_bad_rows_of_users_are_told_and_later_changes_stay(
    services: Services, tmp_path: Path
) -> None:
    await services.users.put("ann", {"attributes": {"now": 1}})
    (tmp_path / "users.jsonl").write_bytes(
        b'{"user": "ann", "attributes": {"then": 1}}\n{"user": "ben", "attributes": {"k": 1}}\n'
        b'{"user": 5}\nnot JSON\n[]\n'
    )
    bad: list[BadRow] = []
    assert await import_users(services, tmp_path, on_bad=bad.append) == 1
    assert [row.line for row in bad] == [3, 4, 5]
    assert {user.id: user.attributes for user in await described(services)} == {
        "ann": {"now": 1}, "ben": {"k": 1}
    }  # fmt: skip
