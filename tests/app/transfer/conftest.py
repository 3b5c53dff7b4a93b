"""Services that backups come from and go to, and what tests fill them with and look into."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.all_tables import metadata
from app.core.access import Role
from app.core.settings import load_settings
from app.transfer.archive import MANIFEST, Backup, TransferError
from app.transfer.backup import write_backup
from app.transfer.restore import restore_backup
from app.wiring import Services, build_services
from tests.app.conftest import add_small_data, publish_model
from tests.conftest import new_database

Make = Callable[[str, str], contextlib.AbstractAsyncContextManager[Services]]
UNICODE = "Zoë/東京 \u202e,\"'\n\\u0000"


async def contents(services: Services) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, in the order of its key."""
    found = {}
    for table in metadata.sorted_tables:
        rows = await services.database.fetch(sa.select(table).order_by(*table.primary_key))
        found[table.name] = [dict(row._mapping) for row in rows]
    return found


@dataclass
class Filled:
    """What the tests ask of a filled service later."""

    version: str
    erased_id: int


async def fill(services: Services) -> Filled:
    """Users, items of every sort, retractions, a model, a key, and jobs in several states."""
    await add_small_data(services)
    version = await publish_model(services)
    services.models.candidates_path(version).write_bytes(b"not looked into")
    await services.catalog.put(
        UNICODE,
        {"title": UNICODE.replace("\n", " "), "hidden": True, "categories": ["α|β"],
         "attributes": {"deep": [1, 2.5, None, {"x": True}], "large": 1e300},
         "embedding": [0.1, -3]},
    )  # fmt: skip
    await services.catalog.put("gone", {"title": "Gone"})
    await services.catalog.delete("gone")
    rows = [
        {"event_id": f"e-{n}", "user": UNICODE, "item": item, "type": "click", "value": value,
         "timestamp": 1_700_000_000.123456 + n, "recommendation_id": reason}
        for n, (item, value, reason) in enumerate(
            [(UNICODE, 1.5, None), ("gone", None, "r"), ("new", -0.25, None), ("new", 1e300, "…")]
        )
    ]  # fmt: skip
    assert (await services.events.add_rows(rows, 0)).accepted == 4
    await services.events.delete_event("e-2")
    # The last id that is given out belongs to nobody any more, on this database or any other.
    await services.events.add_rows([{"user": "to be erased", "item": "new"}], 0)
    erased = (await services.events.profiles.get("to be erased")).user_id
    assert erased is not None
    await services.events.delete_user("to be erased")
    stated = [{"user": UNICODE, "winner": UNICODE, "loser": "new"}]
    assert (await services.events.add_preferences(stated, 0)).accepted == 1
    await services.users.put(UNICODE, {"attributes": {"deep": [1.5, None, {UNICODE: True}]}})
    visitor = f"visitor {UNICODE}"
    await services.events.add_rows([{"event_id": "v", "user": visitor, "item": "new"}], 0)
    await services.users.merge(visitor, UNICODE)
    await services.keys.create("a key", [Role.READ], rate=2.5)
    jobs = metadata.tables["jobs"]
    states: list[dict[str, Any]] = [
        {"status": "queued"},
        {"status": "running", "owner": "w", "lease_until": 2**52, "progress": {"epoch": 3}},
        {"status": "succeeded", "metrics": {"ndcg": 0.5}, "finished_at": 7},
    ]
    async with services.database.write() as conn:
        # Tests copy one empty database, name and all.
        await conn.execute(metadata.tables["instance"].update().values(instance_id="source"))
        for state in states:
            values = {
                "job_id": state["status"],
                "kind": "train",
                "created_at": 5,
                "params": {"d": 8},
            }
            await conn.execute(jobs.insert().values({**values, **state}))
        await conn.execute(
            metadata.tables["triggers"].insert().values(name="events", fired_at=5, fired_seq=3)
        )
        message = {"message_id": "m", "target": "t", "type": "job.ended", "body": "{}"}
        messages = metadata.tables["webhook_messages"]
        await conn.execute(messages.insert().values(**message, created_at=5, next_at=2**52))
        await _add_trials(conn, version)
    async with services.events.imports.record("command", UNICODE, None) as counts:
        counts.reject(f"the user {UNICODE!r} has 7 faults")
    await services.events.counts.write()  # and not while the tables are compared
    return Filled(version, erased)


async def _add_trials(conn: AsyncConnection, version: str) -> None:
    """One that runs and one that has ended, with lists of a user and of nobody."""
    table = metadata.tables
    trial = {"kind": "interleaving", "version_a": version, "version_b": "v", "share": 0.5,
             "status": "running", "created_at": 5}  # fmt: skip
    ended = trial | {"kind": "shadow", "status": "ended", "ended_at": 6, "report": {"rbo": 0.5}}
    for name, values in (("t-1", trial), ("t-2", ended)):
        await conn.execute(table["trials"].insert().values(trial_id=name, **values))
    users = (await conn.execute(sa.select(sa.func.min(table["users"].c.id)))).scalar_one()
    for name, user in (("t-1.0.a", users), ("t-1.0.b", None)):
        impression = {"recommendation_id": name, "trial_id": "t-1", "user_id": user}
        teams = {"a": [1, 2], "b": [3]}
        insert = table["impressions"].insert()
        await conn.execute(insert.values(**impression, teams=teams, created_at=7))
    await conn.execute(table["trial_sums"].insert().values(trial_id="t-2", name="rbo", value=1.5))
    settings = {"version_a": version, "version_b": version, "share": 0.5, "planned_lists": 100,
                "settings": {"diversity": 0.3}, "status": "running", "created_at": 5}  # fmt: skip
    await conn.execute(table["settings_trials"].insert().values(trial_id="t-3", **settings))
    counts = {"trial_id": "t-3", "arm": "b", "user_number": 2**62, "lists": 4}
    await conn.execute(table["trial_lists"].insert().values(counts))
    await conn.execute(table["served"].insert().values(version=version, hour=497_000, lists=12))
    shown = {"external_id": "visitor", "shown_at": 7, "seq": 3, "item_ids": [1, 2], "length": 2}
    await conn.execute(table["shown_lists"].insert().values(shown))
    counted = {"hour": 497_000, "verdict": "rejected", "name": "missing_user", "rows": 3}
    await conn.execute(table["event_counts"].insert().values(counted))


async def restored(services: Services, path: Path) -> None:
    with Backup(path) as backup:
        backup.verify()
        await restore_backup(services, backup)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The same zip with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    other = path.with_name("rewritten.zip")
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return other


def with_manifest(path: Path, **values: Any) -> Path:
    def change(members: dict[str, bytes]) -> None:
        members[MANIFEST] = orjson.dumps(orjson.loads(members[MANIFEST]) | values)

    return rewritten(path, change)


async def refused(make: Make, kind: str, path: Path, says: str) -> None:
    """The restore fails with one line, and the database is as new."""
    async with make(kind, "refusing") as services:
        before = await contents(services)
        with pytest.raises(TransferError, match=says) as error:
            await restored(services, path)
        assert "\n" not in str(error.value)
        assert await contents(services) == before
        assert not list((services.settings.data_dir / "models").glob("*"))


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds a service with a migrated, empty database of the kind asked for."""
    # Migrated now: a migration runs an event loop of its own.
    request.getfixturevalue("sqlite_template")
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "postgresql" in callspec.params.values():
        request.getfixturevalue("postgres_pool")
    with contextlib.ExitStack() as databases:

        @contextlib.asynccontextmanager
        async def build(kind: str, name: str) -> AsyncIterator[Services]:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            url = databases.enter_context(new_database(kind, folder, request))
            services = await build_services(
                load_settings(data_dir=folder, database_url=url, event_group_ms=1)
            )
            try:
                yield services
            finally:
                await services.close()

        yield build


@pytest.fixture(scope="module")
async def small_backup(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    shutil.copy(sqlite_template, folder / "ncr.db")
    services = await build_services(load_settings(data_dir=folder, event_group_ms=1))
    await services.events.add_rows([{"user": f"u{n}", "item": "i"} for n in range(50)], 0)
    await write_backup(services, folder / "small.zip")
    await services.close()
    return folder / "small.zip"


@pytest.fixture
def backup(small_backup: Path, tmp_path: Path) -> Path:
    """A small backup, of SQLite."""
    return Path(shutil.copy(small_backup, tmp_path))
