"""How many events a second one server takes over HTTP, in lists and one by one.

    python -m benchmarks.ingest DATA_DIR [DATABASE_URL]

DATA_DIR is the data folder of a service, as `make demo` leaves it in var/demo/NAME; the benchmark
works on a copy. With the URL of a PostgreSQL server it measures there too, in a database that it
makes and drops. Both databases are as durable as the service runs them, which the result states.
Closed loops; the client runs beside the server, on the same cores, and so does PostgreSQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psycopg
from psycopg import sql

from app.core.migrations import upgrade
from benchmarks.harness import publish, run_command
from benchmarks.load import closed_loop, server

SECONDS = 5.0
ROUNDS = 3
CASES = ((1_000, 8), (1, 32))  # rows of a list, connections
DURABLE = ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "server_version")


def posts(base: str, rows: int, run: str) -> Iterator[bytes]:
    """Requests with events that nobody has posted before."""
    host = urlsplit(base).netloc
    head = f"POST /events HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    n = 0
    while True:
        body = orjson.dumps(
            [
                {"event_id": f"{run}-{n}-{i}", "user": f"u{(n + i) % 997}", "item": f"i{i % 499}"}
                for i in range(rows)
            ]
        )
        yield f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        n += 1


async def run(base: str, kind: str) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for size, connections in CASES:
        for turn in range(ROUNDS):
            requests = posts(base, size, f"{size}-{turn}")
            report = await closed_loop(base, requests, connections, SECONDS)
            others = sum(n for status, n in report.statuses.items() if status != 200)
            rate, p50, p99 = report.rate(), report.quantile(0.5), report.quantile(0.99)
            rows.append([kind, size, connections, rate * size, rate, p50, p99, others])
    return rows


@contextlib.contextmanager
def own_database(server_url: str) -> Iterator[str]:
    """An empty, migrated database on a PostgreSQL server, for as long as this is open."""
    name = f"ncr_bench_{secrets.token_hex(6)}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            base, mark, options = server_url.partition("?")
            url = f"{base.rpartition('/')[0]}/{name}{mark}{options}"
            upgrade(url)
            yield url
        finally:
            drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
            admin.execute(drop.format(sql.Identifier(name)))


def durability(url: str) -> dict[str, str]:
    """What a new connection to this PostgreSQL database is set to, as the service's are."""
    with psycopg.connect(url) as connection:
        query = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s) ORDER BY name"
        return dict(connection.execute(query, (list(DURABLE),)).fetchall())


def main(data_dir: Path, server_url: str = "") -> None:
    durable = {
        "sqlite": {
            "journal_mode": "wal", "synchronous": "full", "server_version": sqlite3.sqlite_version
        }
    }  # fmt: skip
    # Said outright, so that the environment's own database stays out of it.
    with server(data_dir, database_url="") as running:
        rows = asyncio.run(run(running.url, "sqlite"))
    if server_url:
        with own_database(server_url) as url:
            durable["postgresql"] = durability(url)
            with server(data_dir, database_url=url) as running:
                rows += asyncio.run(run(running.url, "postgresql"))
    publish(
        "ingest",
        [
            "database", "rows a list", "connections", "events/s", "lists/s",
            "p50 ms", "p99 ms", "errors",
        ],
        rows,
        data=data_dir.name,
        seconds=SECONDS,
        durability=durable,
    )  # fmt: skip
    for kind, settings in durable.items():
        print(kind, *(f"{name}={value}" for name, value in settings.items()))


if __name__ == "__main__":
    run_command(main)
