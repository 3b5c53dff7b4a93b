"""Databases of PostgreSQL for tests: copied from a template, emptied, and used again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

POSTGRES_URL = os.environ.get(
    "NCR_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres"
)
EMPTY = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
SET session_replication_role = replica;  -- foreign keys: all of it goes
"""

Connection = psycopg.Connection[tuple[object, ...]]


def admin() -> Connection:
    """A connection from which databases are made. Raises psycopg.OperationalError."""
    return psycopg.connect(POSTGRES_URL, autocommit=True, connect_timeout=5)


def url_of(name: str) -> str:
    return f"{POSTGRES_URL.partition('?')[0].rpartition('/')[0]}/{name}"


def create(template: str | None = None) -> str:
    """A new database's name."""
    name = f"ncr_test_{secrets.token_hex(6)}"
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    with admin() as connection:
        connection.execute(statement)
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
