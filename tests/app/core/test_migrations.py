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

from app.all_tables import metadata
from app.core.database import Database
from app.core.errors import SettingsError
from app.core.migrations import (
    current_revision,
    ensure_schema,
    head_revision,
    migrate,
    schema_is_current,
)
from app.core.settings import load_settings
from app.core.tables import instance
from app.main import create_app
from tests.app.conftest import client_of, until


async def differences(database: Database) -> list[Any]:
    """What a migration would have to change; nothing, where they agree."""

    def compare(conn: sa.Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
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
    assert await schema_is_current(empty)
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
    assert await schema_is_current(empty)


async def test_ensure_schema_migrates_sqlite_only(empty: Database) -> None:
    if empty.dialect == "sqlite":
        await ensure_schema(empty)
        assert await schema_is_current(empty)
    else:
        with pytest.raises(SettingsError, match="run `ncr db upgrade`"):
            await ensure_schema(empty)


async def test_a_newer_schema_is_refused(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SettingsError, match="newer"):
        await ensure_schema(database)


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
    """The same without columns that the old version did not have."""
    return {
        table: [{column: row[column] for column in columns_of[table][0]} for row in rows]
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
    assert await schema_is_current(old)
    assert only(await contents(old), before) == before

    await migrate(old, "0001")
    assert await current_revision(old) == "0001"
    assert await contents(old) == before

    await migrate(old)
    assert await schema_is_current(old)
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
    assert await schema_is_current(old)
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
