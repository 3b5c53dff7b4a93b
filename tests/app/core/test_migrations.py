"""The schema's versions, and databases of an earlier one: upgraded, and served from."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import httpx2
import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError

from app.all_tables import metadata
from app.core.database import Database
from app.core.errors import SettingsError
from app.core.migrations import (
    compatible_from,
    current_revision,
    ensure_schema,
    head_revision,
    known_revisions,
    migrate,
    wait_for_database,
)
from app.core.settings import Settings, load_settings
from app.core.tables import instance
from app.main import create_app
from tests.app.conftest import client_of, until
from tests.cluster.process import free_port
from tests.conftest import BACKENDS


async def differences(database: Database) -> list[Any]:
    """What a migration would have to change; nothing, where they agree."""

    def is_compared(part: Any, _name: str | None, kind: str, *_: Any) -> bool:
        # PostgreSQL has triggers in place of these keys: `test_events_refer_to_what_exists`.
        if database.dialect == "postgresql":
            return not (kind == "foreign_key_constraint" and part.table.name == "events")
        # SQLite needs no index of its own for the beginnings of ids.
        return not (kind == "index" and str(part.name).endswith("_prefix"))

    def compare(conn: sa.Connection) -> list[Any]:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_object": is_compared,
        }
        context = MigrationContext.configure(conn, opts=options)
        found: list[Any] = compare_metadata(context, metadata)
        return found

    async with database.read() as conn:
        return await conn.run_sync(compare)


pytestmark = pytest.mark.anyio


async def test_migrations_create_the_declared_tables(database: Database) -> None:
    assert await differences(database) == []
    assert await current_revision(database) == head_revision()


async def test_downgrade_and_upgrade_again(empty: Database) -> None:
    assert await current_revision(empty) is None
    await migrate(empty)
    assert await current_revision(empty) == head_revision()
    await migrate(empty, "base")
    assert await current_revision(empty) is None
    await migrate(empty)
    await migrate(empty)
    assert await differences(empty) == []


async def test_each_database_has_a_token_secret_of_its_own(empty: Database) -> None:
    found = set()
    for revision in ("head", "0004", "head"):
        await migrate(empty, revision)
        if revision == "head":
            found.add((await empty.fetch(sa.select(instance.c.token_secret)))[0][0])
    assert [len(bytes.fromhex(secret)) for secret in found] == [32, 32]


async def test_concurrent_migrations_are_safe(empty: Database) -> None:
    url = empty.url.render_as_string(hide_password=False)
    others = [Database(url) for _ in range(6)]
    await asyncio.gather(*(migrate(other) for other in others))
    for other in others:
        await other.close()
    assert await current_revision(empty) == head_revision()


async def test_ensure_schema_migrates_sqlite_only(empty: Database) -> None:
    if empty.dialect == "sqlite":
        await ensure_schema(empty)
        assert await current_revision(empty) == head_revision()
    else:
        with pytest.raises(SettingsError, match="run `ncr db upgrade`"):
            await ensure_schema(empty)


async def make_newer(database: Database, compatible_from: str | None) -> None:
    """The schema is as a later version has migrated it, which added what this one ignores."""
    async with database.write() as conn:
        await conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        await conn.execute(instance.update().values(compatible_from=compatible_from))


async def test_a_newer_schema_is_refused_unless_it_is_compatible(database: Database) -> None:
    for incompatible in ("9999", None):
        await make_newer(database, incompatible)
        with pytest.raises(SettingsError, match="newer"):
            await ensure_schema(database)
    await make_newer(database, head_revision())
    await ensure_schema(database)


async def test_a_server_serves_and_starts_while_the_newer_schema_is_compatible(
    database: Database, settings: Settings
) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await until(lambda: ready(client))
        await make_newer(database, head_revision())
        app.state.readiness.add("asked again", nothing_wrong)
        assert await ready(client)
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await until(lambda: ready(client))
        event = {"user": "ann", "item": "a"}
        assert (await client.post("/events", json=event)).json()["accepted"] == 1
        await make_newer(database, "9999")
        app.state.readiness.add("asked again", nothing_wrong)
        answer = await client.get("/health/ready")
        assert answer.status_code == 503
        assert "newer" in answer.json()["checks"]["database"]


async def nothing_wrong() -> None:
    """A check that makes readiness ask all checks again."""


async def test_each_schema_says_from_which_version_on_servers_work_with_it(empty: Database) -> None:
    revisions = sorted(known_revisions())
    oldest = [compatible_from(revision) for revision in revisions]
    # Who is compatible with a schema has all that later ones keep.
    assert oldest == sorted(oldest)
    assert all(old <= own for old, own in zip(oldest, revisions, strict=True))
    await migrate(empty)
    recorded = await empty.fetch(sa.select(instance.c.compatible_from))
    assert recorded[0][0] == oldest[-1]


ON_POSTGRESQL, ON_SQLITE = (
    pytest.mark.parametrize("empty_database_url", [kind], indirect=True)
    for kind in reversed(BACKENDS)
)

NEW_EVENT = (
    "INSERT INTO events (seq, event_id, user_id, item_id, type, timestamp, created_at) VALUES "
)
WRONG = (
    NEW_EVENT + "(2, 'b', 1, 1, '', 0, 0), (3, 'c', 2, 1, '', 0, 0)",
    NEW_EVENT + "(2, 'b', 1, 2, '', 0, 0)",
    "UPDATE events SET user_id = 2",
    "UPDATE events SET item_id = 2",
    "DELETE FROM users",
    "DELETE FROM items",
    "UPDATE users SET id = 2",
    "UPDATE items SET id = 2",
)


async def run_sql(database: Database, *statements: str) -> None:
    async with database.write() as conn:
        for statement in statements:
            await conn.exec_driver_sql(statement)


async def test_events_refer_to_what_exists(empty: Database) -> None:
    await migrate(empty)
    await run_sql(
        empty,
        "INSERT INTO users (id, external_id, created_at) VALUES (1, 'u', 0)",
        "INSERT INTO items (id, external_id, seq, created_at, updated_at) VALUES (1, 'i', 0, 0, 0)",
        NEW_EVENT + "(1, 'a', 1, 1, '', 0, 0)",
    )
    truncates = ("TRUNCATE users CASCADE", "TRUNCATE items CASCADE")
    for revision in ("head", "0006", "head"):
        await migrate(empty, revision)
        on_newest = revision == "head" and empty.dialect == "postgresql"
        for statement in WRONG + truncates * on_newest:
            with pytest.raises(IntegrityError, match=r"(?i)foreign"):
                await run_sql(empty, statement)
        assert (await empty.fetch(sa.text("SELECT count(*) FROM events")))[0][0] == 1
    await run_sql(empty, "DELETE FROM events", "DELETE FROM users", "DELETE FROM items")


@ON_POSTGRESQL
async def test_nobody_deletes_what_events_refer_to_before_they_are_committed(
    empty: Database,
) -> None:
    await migrate(empty)
    await run_sql(
        empty,
        "INSERT INTO users (id, external_id, created_at) VALUES (1, 'u', 0)",
        "INSERT INTO items (id, external_id, seq, created_at, updated_at) VALUES (1, 'i', 0, 0, 0)",
    )
    for table in ("users", "items"):
        async with empty.write() as conn:
            await conn.exec_driver_sql(NEW_EVENT + f"(1, '{table}', 1, 1, '', 0, 0)")
            deletion = asyncio.create_task(run_sql(empty, f"DELETE FROM {table}"))
            await until(lambda: somebody_waits(empty))
        with pytest.raises(IntegrityError):
            await deletion
        await run_sql(empty, "DELETE FROM events")


async def somebody_waits(database: Database) -> bool:
    query = """SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE NOT granted AND datname = current_database()"""
    return bool((await database.fetch(sa.text(query)))[0][0])


DUMPS = Path(__file__).parents[2] / "data"
TABLES = ("counters", "users", "items", "events", "models", "activation", "jobs")
NCR = [sys.executable, "-c", "from app.cli import main; main()"]


@pytest.fixture
async def old(empty: Database, empty_database_url: str) -> Database:
    """A database as version 0001 left it. The files were written by `.dump` and `pg_dump`."""
    url = make_url(empty_database_url)
    script = (DUMPS / f"schema-0001-{url.get_backend_name()}.sql").read_text()
    if url.get_backend_name() == "sqlite":
        connection = sqlite3.connect(str(url.database))
        connection.executescript(script)
        connection.close()
    else:
        with psycopg.connect(empty_database_url) as postgres:
            postgres.execute(script.encode())
    return empty


async def contents(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Every row of the tables that the old version had."""
    found = {}
    for name in TABLES:
        rows = await database.fetch(sa.text(f"SELECT * FROM {name} ORDER BY 1"))
        found[name] = [dict(row._mapping) for row in rows]
    return found


def only(now: dict[str, list[dict[str, Any]]], columns_of: dict[str, list[dict[str, Any]]]) -> Any:
    """The same without columns and counters that the old version did not have."""
    counters = {row["name"] for row in columns_of["counters"]}
    return {
        table: [
            {column: row[column] for column in columns_of[table][0]}
            for row in rows
            if table != "counters" or row["name"] in counters
        ]
        for table, rows in now.items()
    }


async def test_an_upgrade_from_0001_keeps_the_data(old: Database) -> None:
    assert await current_revision(old) == "0001"
    before = await contents(old)
    assert all(before.values())
    if old.dialect == "postgresql":
        with pytest.raises(SettingsError, match=r"is at 0001, .*run `ncr db upgrade`"):
            await ensure_schema(old)
        assert await current_revision(old) == "0001"
        await migrate(old)
    else:
        await ensure_schema(old)
    assert await current_revision(old) == head_revision()
    assert only(await contents(old), before) == before

    await migrate(old, "0001")
    assert await current_revision(old) == "0001"
    assert await contents(old) == before

    await migrate(old)
    assert await current_revision(old) == head_revision()
    assert only(await contents(old), before) == before


async def test_an_upgraded_schema_equals_that_of_a_new_database(old: Database) -> None:
    await migrate(old)
    assert await differences(old) == []


async def ready(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


async def test_the_service_runs_on_an_upgraded_database(old: Database, tmp_path: Path) -> None:
    await migrate(old)
    settings = load_settings(
        data_dir=tmp_path,
        database_url=old.url.render_as_string(hide_password=False),
        event_group_ms=1,
        precompute_users=0,
        redis_url=None,
        admin_key=None,
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        # Not at the first look, on a machine that is busy with other things.
        await until(lambda: ready(client))

        services = app.state.services
        profile = await services.events.profiles.get("ann")
        assert (profile.last_seq, profile.event_seq) == (9, 9)
        assert profile.seqs.tolist() == [1, 2, 9]
        # Item b is hidden, d is deleted: an old catalogue keeps what it knew of its items.
        lists = (await client.get("/recommend/ann?exclude_seen=false")).json()
        assert {item["id"] for item in lists["items"]} == {"a", "c"}
        assert (await client.get("/items/a")).json()["attributes"] == {"year": 1999, "tag": "x\\y"}
        assert (await client.get("/items/d")).status_code == 404

        history = (await client.get("/users/zo%C3%AB%2F%C3%BC%20%E5%90%8D%E5%89%8D/events")).json()
        assert [event["seq"] for event in history["items"]] == [8, 6]
        history = (await client.get("/users/bob/events")).json()["items"]
        assert [(event["seq"], event["value"]) for event in history] == [
            (7, -2.5), (5, 0.1), (3, 1e300)
        ]  # fmt: skip
        assert history[1]["event_id"] == "e5 'x' é"

        posted = await client.post(
            "/events",
            json=[
                {"event_id": "e1", "user": "ann", "item": "a"},
                {"event_id": "e2", "user": "ann", "item": "other"},
                {"event_id": "new", "user": "newcomer", "item": "new item"},
            ],
        )
        answer = posted.json()
        assert (answer["accepted"], answer["duplicates"], answer["last_seq"]) == (1, 1, 10)
        assert [(bad["index"], bad["code"]) for bad in answer["rejected"]] == [
            (1, "event_id_conflict")
        ]
        # The ids go on after those of rows that are gone: nobody gets another's.
        newcomer = await services.events.profiles.get("newcomer")
        assert (newcomer.user_id, newcomer.last_seq, newcomer.seen.tolist()) == (5, 10, [5])

        jobs = (await client.get("/admin/jobs")).json()["items"]
        assert [(job["job_id"], job["status"]) for job in jobs] == [
            ("job-2", "failed"), ("job-1", "succeeded")
        ]  # fmt: skip
        models = (await client.get("/admin/models")).json()["items"]
        assert [(model["version"], model["metrics"]["sampled"]) for model in models] == [
            ("20260101-000000-abcdef", {"ndcg@10": 0.25, "hr@10": 0.5})
        ]


@pytest.mark.e2e
@pytest.mark.slow
async def test_concurrent_processes_upgrade_safely(
    old: Database, empty_database_url: str, tmp_path: Path
) -> None:
    before = await contents(old)
    upgrade_at_once(empty_database_url, tmp_path)
    assert await current_revision(old) == head_revision()
    versions = await old.fetch(sa.text("SELECT version_num FROM alembic_version"))
    assert [row[0] for row in versions] == [head_revision()]
    assert only(await contents(old), before) == before


def upgrade_at_once(url: str, data_dir: Path, processes: int = 3) -> None:
    env = {**os.environ, "NCR_DATABASE_URL": url, "NCR_DATA_DIR": str(data_dir)}
    started = [
        Popen([*NCR, "db", "upgrade"], env=env, stdout=PIPE, stderr=STDOUT)
        for _ in range(processes)
    ]
    try:
        said = [process.communicate(timeout=120)[0].decode() for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0] * processes, said
    assert all(f"the schema is at {head_revision()}" in text for text in said), said


EVENT = "INSERT INTO events VALUES ({0}, 'event {0}', 1, 1, 'view', NULL, 1, NULL, 1)"
INDEX = "ix_events_recommendation_id"
VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"


def execute(connection: psycopg.Connection[Any], statement: str) -> None:
    connection.execute(statement.encode())


async def waits(url: str) -> None:
    """Until a session waits for a lock of another."""
    query = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"

    def does() -> bool:
        with psycopg.connect(url) as connection:
            return bool(connection.execute(query, (connection.info.dbname,)).fetchall())

    await until(does)


@ON_POSTGRESQL
async def test_events_are_written_while_an_index_of_them_is_built(
    old: Database, empty_database_url: str
) -> None:
    with (
        psycopg.connect(empty_database_url) as slow,
        psycopg.connect(empty_database_url, options="-c statement_timeout=5000") as client,
    ):
        execute(slow, EVENT.format(20))  # and no commit: whoever builds an index waits for it
        migration = asyncio.create_task(migrate(old))
        await waits(empty_database_url)
        execute(client, EVENT.format(21))
        client.commit()
        # It waits as one that is built beside writers does, which is there and not yet used.
        assert client.execute(VALID, (INDEX,)).fetchall() == [(False,)]
        client.commit()
        assert not migration.done()
        slow.commit()
        await migration
        assert client.execute(VALID, (INDEX,)).fetchall() == [(True,)]
    assert await current_revision(old) == head_revision()
    assert await differences(old) == []


@ON_POSTGRESQL
async def test_an_index_whose_build_was_interrupted_is_built_again(
    old: Database, empty_database_url: str
) -> None:
    await migrate(old, "0003")
    with psycopg.connect(empty_database_url) as slow:
        execute(slow, EVENT.format(20))
        migration = asyncio.create_task(migrate(old))
        await waits(empty_database_url)
        execute(
            slow,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND datname = current_database()",
        )
        with pytest.raises(sa.exc.SQLAlchemyError):
            await migration
        assert slow.execute(VALID, (INDEX,)).fetchall() == [(False,)]
    assert await current_revision(old) == "0003"
    await migrate(old)
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute(VALID, (INDEX,)).fetchall() == [(True,)]
    assert await differences(old) == []


@ON_POSTGRESQL
async def test_requests_go_on_while_a_migration_waits_for_a_long_transaction(
    old: Database, empty_database_url: str
) -> None:
    await migrate(old, "0004")
    with (
        psycopg.connect(empty_database_url) as backup,
        psycopg.connect(empty_database_url, options="-c statement_timeout=5000") as client,
    ):
        execute(backup, "SELECT * FROM jobs")  # and goes on with other tables
        migration = asyncio.create_task(migrate(old))
        await waits(empty_database_url)
        execute(client, "SELECT * FROM jobs")
        client.commit()
        assert not migration.done()
        backup.commit()
        await migration
    assert await current_revision(old) == head_revision()


@ON_POSTGRESQL
async def test_an_upgrade_waits_for_a_database_that_starts(empty_database_url: str) -> None:
    url = make_url(empty_database_url)
    port = free_port()
    starting = Database(
        url.set(drivername="postgresql+psycopg", port=port).render_as_string(hide_password=False)
    )
    with pytest.raises(sa.exc.OperationalError):
        await wait_for_database(starting, 0)
    waiting = asyncio.create_task(wait_for_database(starting))
    await asyncio.sleep(0.1)
    assert not waiting.done()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await asyncio.open_connection(url.host, url.port or 5432)
        await asyncio.gather(copy(reader, server[1]), copy(server[0], writer))

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while chunk := await source.read(65536):
            target.write(chunk)
        target.close()

    async with await asyncio.start_server(pass_on, "127.0.0.1", port):
        await waiting
        await starting.close()


def copies_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("empty.db.00"))


@ON_SQLITE
async def test_the_file_is_copied_before_a_migration(old: Database, tmp_path: Path) -> None:
    await migrate(old, "0004")
    assert [path.name[:14] for path in copies_in(tmp_path)] == ["empty.db.0001-"]
    async with old.write() as conn:  # what is in the log belongs to it
        await conn.execute(sa.text("UPDATE counters SET value = 77 WHERE name = 'event_seq'"))
    (tmp_path / "empty.db.0009-20260101-000000-000000.part").touch()
    (tmp_path / "empty.db.0004-mine").touch()
    await migrate(old)
    (newest,) = (
        path for path in copies_in(tmp_path) if len(path.name) > 20 and "0004" in path.name
    )
    assert newest.stat().st_mode & 0o777 == 0o600
    copy = sqlite3.connect(newest)
    assert copy.execute("SELECT version_num FROM alembic_version").fetchall() == [("0004",)]
    query = "SELECT value FROM counters WHERE name = 'event_seq'"
    assert copy.execute(query).fetchall() == [(77,)]
    copy.close()
    for revision in ("0005", "head", "0005"):
        await migrate(old, revision)
    await migrate(old, "0005")  # nothing to do, and no copy
    names = [path.name for path in copies_in(tmp_path)]
    assert [name[9:13] for name in names] == ["0004", "0005", head_revision()]
    assert "empty.db.0004-mine" in names


@ON_SQLITE
async def test_without_room_for_the_copy_nothing_is_migrated(
    old: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy needs as many pages as the database has; the limit stands for the disk's end."""
    real = sqlite3.connect

    def connect(path: Any, **options: Any) -> sqlite3.Connection:
        connection = real(path, **options)
        if str(path).endswith(".part"):
            connection.execute("PRAGMA max_page_count = 2")
        return connection

    monkeypatch.setattr("app.core.database.sqlite3.connect", connect)
    with pytest.raises(SettingsError, match=r"not migrated because the copy .* full"):
        await ensure_schema(old)
    monkeypatch.undo()
    assert await current_revision(old) == "0001"
    assert copies_in(tmp_path) == []
    await ensure_schema(old)
    assert await current_revision(old) == head_revision()
