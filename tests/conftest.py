"""What tests of both packages use: the event loop, and every database there is to test on."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import runpy
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis
import structlog
from psycopg import sql

from app.core.database import Database
from app.core.migrations import migrate
from app.core.settings import normalise_database_url

POSTGRES_URL = os.environ.get(
    "NCR_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres"
)
TERMINATE = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
"""
EMPTY = f"""{TERMINATE}
SET session_replication_role = replica;  -- foreign keys: all of it goes
"""

Connection = psycopg.Connection[tuple[object, ...]]


def admin() -> Connection:
    """A connection from which databases are made. Raises psycopg.OperationalError."""
    return psycopg.connect(POSTGRES_URL, autocommit=True, connect_timeout=5)


def url_of(name: str) -> str:
    return f"{POSTGRES_URL.partition('?')[0].rpartition('/')[0]}/{name}"


def create(template: str | None = None) -> str:
    """A new database's name. Its commits do not wait for a disk."""
    name = f"ncr_test_{secrets.token_hex(6)}"
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    change = sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(name))
    with admin() as connection:
        connection.execute(statement)
        connection.execute(change)
    return name


def drop(name: str) -> None:
    with admin() as connection:
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        connection.execute(statement.format(sql.Identifier(name)))


class Pool:
    """Copies of a migrated database. Making and dropping one takes many times as long as emptying
    it, which leaves it as it was: no test changes the schema of one that comes from here.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._free: list[str] = []
        with psycopg.connect(url_of(template)) as connection:
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            names = [str(row[0]) for row in connection.execute(query).fetchall()]
            self._rows = {name: _copied(connection, name) for name in names}
            query = "SELECT sequencename, start_value FROM pg_sequences WHERE schemaname = 'public'"
            self._starts = connection.execute(query).fetchall()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The name of one that is empty, for as long as this lasts."""
        name = self._free.pop() if self._free else create(self._template)
        try:
            yield name
        finally:
            try:
                self._empty(name)
                self._free.append(name)
            except psycopg.Error:  # for want of a right, or after a crash
                drop(name)

    def close(self) -> None:
        for name in self._free:
            drop(name)

    def _empty(self, name: str) -> None:
        deletes = b"".join(b"DELETE FROM %s;\n" % table.encode() for table in self._rows)
        with psycopg.connect(url_of(name)) as connection:
            connection.execute(EMPTY.encode() + deletes)
            for table, rows in self._rows.items():
                if rows:
                    with connection.cursor().copy(f"COPY {table} FROM STDIN".encode()) as copy:
                        copy.write(rows)
            for sequence, start in self._starts:
                connection.execute("SELECT setval(%s::regclass, %s, false)", (sequence, start))


def _copied(connection: Connection, table: str) -> bytes:
    with connection.cursor().copy(f"COPY {table} TO STDOUT".encode()) as copy:
        return b"".join(bytes(piece) for piece in copy)


# The client for threads is made, and not in the repository.
runpy.run_path(str(Path(__file__).parents[1] / "clients/python/hatch_build.py"))["write_client"]()

REDIS_URL = os.environ.get("NCR_TEST_REDIS_URL", "redis://127.0.0.1:6379/15")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts real processes is slow: `-m "not slow"` leaves it out too."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What is imported stays: spare the garbage collector half a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands set up the log of a process. The next test in the process starts without that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def redis_url() -> str:
    """A Redis to share with others. Skips where there is none, except where there has to be one."""
    try:
        with redis.Redis.from_url(REDIS_URL, socket_connect_timeout=5) as client:
            client.ping()
    except redis.RedisError as error:
        skip_or_fail(f"no Redis at {REDIS_URL.rpartition('@')[2]}: {error}")
    return REDIS_URL


@pytest.fixture
def redis_prefix(redis_url: str) -> Iterator[str]:
    """Names of the test's own, gone at its end."""
    prefix = f"ncr-test-{secrets.token_hex(6)}"
    yield prefix
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(match=f"{prefix}:*"):
            client.delete(key)


def skip_or_fail(reason: str) -> None:
    """Skips a test that cannot be run here, except in CI, where it has to be."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The service is written for asyncio."""
    return "asyncio"


def _migrate(url: str) -> None:
    async def run() -> None:
        database = Database(normalise_database_url(url))
        await migrate(database)
        await database.close()

    with ThreadPoolExecutor(1) as thread:  # a fixture may be waited for in a running event loop
        thread.submit(asyncio.run, run()).result()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated file, copied for each test."""
    path = tmp_path_factory.mktemp("template") / "ncr.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres() -> None:
    """Skips where there is no server, except where there has to be one."""
    try:
        admin().close()
    except psycopg.OperationalError as error:
        skip_or_fail(f"no PostgreSQL at {POSTGRES_URL.rpartition('@')[2]}: {error}")


@pytest.fixture(scope="session")
def postgres_pool(postgres: None) -> Iterator[Pool]:
    """Migrated, empty databases."""
    template = create()
    try:
        _migrate(url_of(template))
        pool = Pool(template)
        yield pool
        pool.close()
    finally:
        drop(template)


@pytest.fixture(scope="session")
def bare_postgres(postgres: None) -> Iterator[str]:
    """The name of a database for `empty_database_url`."""
    name = create()
    yield name
    drop(name)


BACKENDS = ["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])]
# For tests of one database, and for long ones of what does not depend on it.
ON_SQLITE, ON_POSTGRESQL = (
    pytest.mark.parametrize("database_url", [kind], indirect=True) for kind in BACKENDS
)


@contextmanager
def new_database(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated, empty database of a kind; one of SQLite lies in the folder."""
    if kind == "sqlite":
        path = folder / "ncr.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    pool: Pool = request.getfixturevalue("postgres_pool")
    with pool.database() as name:
        yield url_of(name)


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated, empty database of the test's own: each test runs on both kinds."""
    with new_database(request.param, tmp_path, request) as url:
        yield url


@pytest.fixture(params=BACKENDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without a schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    name: str = request.getfixturevalue("bare_postgres")
    with psycopg.connect(url_of(name)) as connection:
        connection.execute(f"{TERMINATE} DROP SCHEMA public CASCADE; CREATE SCHEMA public".encode())
    yield url_of(name)
