"""How many events a second a server takes over HTTP, in lists and one by one, and an import.

    python -m benchmarks.ingest DATA_DIR [DATABASE_URL]
    python -m benchmarks.ingest import [MILLIONS [DATABASE_URL]]

DATA_DIR is the data folder of a service, as `make demo` leaves it in var/demo/NAME; the benchmark
works on a copy. With the URL of a PostgreSQL server it measures there too, in a database that it
makes and drops. Both databases are as durable as the service runs them, which the result states.
Closed loops; the client runs beside the server, on the same cores, and so does PostgreSQL.

The second form, on SQLite or with a URL on PostgreSQL, runs `ncr import` on a Parquet file of so
many million events in the order of their times, by 26 users and 20 items a thousand events, at most
100,000 items. A server has the same database open and takes an event every 0.25 s. The rate of each
million counts from the end of the one before; reading and sorting, which come first, and what
follows the last commit, which is the index by item, are rows of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import orjson
import psycopg
from numpy.typing import NDArray
from psycopg import sql

from app.core.migrations import upgrade
from benchmarks.harness import publish, run_command
from benchmarks.load import Server, closed_loop, server

BLOCK_ROWS = 1_000_000
FIRST_SECOND = 1_600_000_000
ITEM_TAIL, USER_TAIL = 3.0, 1.7  # larger: fewer items, or users, have most of the events


@dataclass(frozen=True)
class World:
    """Synthetic data of any size: events of a long tail, as a service logs them.

    The popularity of items and the activity of users follow a power law. The events are in the
    order of their times, so that users alternate.
    """

    events: int
    users: int
    items: int

    def blocks(self, seed: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields users and items of the events, some at a time."""
        rng = np.random.default_rng(seed)
        users, items = rng.permutation(self.users), rng.permutation(self.items)
        for start in range(0, self.events, BLOCK_ROWS):
            n = min(BLOCK_ROWS, self.events - start)
            user = users[(self.users * rng.random(n) ** USER_TAIL).astype(np.int64)]
            yield user, items[(self.items * rng.random(n) ** ITEM_TAIL).astype(np.int64)]

    def write_items(self, path: Path, categories: int) -> None:
        """Writes titles and one of so many categories of each item, as CSV."""
        with path.open("w") as file:
            file.write("item,title,genres\n")
            file.writelines(f"item-{i},Item {i},c{i % categories}\n" for i in range(self.items))

    def write(self, path: Path) -> None:
        """Writes the events as a Parquet file that `ncr import` reads."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = [("user", pa.string()), ("item", pa.string()), ("timestamp", pa.int64())]
        with pq.ParquetWriter(path, pa.schema(names)) as writer:
            second = FIRST_SECOND
            for user, item in self.blocks():
                columns = {
                    "user": [f"user-{u}" for u in user.tolist()],
                    "item": [f"item-{i}" for i in item.tolist()],
                    "timestamp": np.arange(second, second + len(user)),
                }
                writer.write_table(pa.table(columns, schema=writer.schema))
                second += len(user)


SECONDS = 5.0
ROUNDS = 3
CASES = ((1_000, 8), (1, 32))  # rows of a list, connections
MILLION = 1_000_000
USERS_OF_100, MAX_ITEMS = 2.6, 100_000
POST_SECONDS = 0.25
POLL_SECONDS = 0.05
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


@contextlib.contextmanager
def own_place(folder: Path, kind: str, server_url: str) -> Iterator[str]:
    """A new folder, for as long as this is open; yields the URL of a database, empty for SQLite."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        yield stack.enter_context(own_database(server_url)) if kind == "postgresql" else ""


def durability(url: str) -> dict[str, str]:
    """What a new connection to this PostgreSQL database is set to, as the service's are."""
    with psycopg.connect(url) as connection:
        query = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s) ORDER BY name"
        return dict(connection.execute(query, (list(DURABLE),)).fetchall())


def last_seq(url: str) -> Callable[[], int]:
    """How many events have been committed, read past the service."""
    query = "SELECT value FROM counters WHERE name = 'event_seq'"
    if url.startswith("postgresql"):
        database = psycopg.connect(url, autocommit=True)
        return lambda: int(database.execute(query).fetchone()[0])  # type: ignore[index]
    file = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
    return lambda: int(file.execute(query).fetchone()[0])


def import_beside(running: Server, url: str, file: Path, kind: str, events: int) -> list[list[Any]]:
    """Imports a file while a server of the same database takes events."""
    committed, failed = last_seq(url), 0
    posts_ms: list[float] = []
    env = os.environ | {"NCR_DATA_DIR": str(running.data_dir), "NCR_DATABASE_URL": url}
    program = "from app.cli.main import main; main()"
    started = marked = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, "import", str(file)], env=env)
    rows: list[list[Any]] = []

    def mark(what: str, n: int, at: float | None = None) -> None:
        nonlocal marked, posts_ms, failed
        now = at or time.perf_counter()
        slowest = max(posts_ms, default=0.0)
        rows.append([kind, what, now - marked, n / (now - marked), slowest, failed])
        marked, posts_ms, failed = now, [], 0

    def post() -> None:
        nonlocal failed
        with httpx2.Client(base_url=running.url, timeout=60) as client:
            while process.poll() is None:
                sent = time.perf_counter()
                answer = client.post("/events", json={"user": "beside", "item": "beside"})
                posts_ms.append(1e3 * (time.perf_counter() - sent))
                failed += answer.status_code != 200
                time.sleep(POST_SECONDS)

    reached = -1
    with ThreadPoolExecutor(1) as beside:  # a post may wait for the index: the marks do not
        posting = beside.submit(post)
        while process.poll() is None:
            stored = committed()
            if reached < 0 and stored > MILLION / 40:
                mark("read and sort", events)
                reached = 0
            while reached >= 0 and stored >= (reached + 1) * MILLION:
                reached += 1
                mark(f"million {reached}", MILLION)
            time.sleep(POLL_SECONDS)
        ended = time.perf_counter()
        posting.result()
    if process.returncode:
        sys.exit("the import failed")
    mark("last rows and index", events, ended)
    seconds = ended - started
    return [*rows, [kind, "all", seconds, events / seconds, None, None]]


def import_events(millions: float = 10.0, server_url: str = "") -> None:
    events = int(millions * MILLION)
    world = World(events, int(events * USERS_OF_100 / 100), min(MAX_ITEMS, events // 50))
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        file, empty = Path(scratch) / "events.parquet", Path(scratch) / "empty"
        world.write(file)
        empty.mkdir()
        kind = "postgresql" if server_url else "sqlite"
        if not server_url:
            with server(empty, database_url="") as running:
                url = f"sqlite:///{running.data_dir / 'ncr.db'}"
                rows += import_beside(running, url, file, kind, events)
        else:
            with own_database(server_url) as url, server(empty, database_url=url) as running:
                rows += import_beside(running, url, file, kind, events)
    columns = ["database", "part", "seconds", "rows/s", "slowest post ms", "posts failed"]
    publish(f"import {kind}", columns, rows, events=events, users=world.users, items=world.items)


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
    run_command(main, **{"import": import_events})
