"""A rolling upgrade and downgrade under load: two servers behind a proxy, on PostgreSQL.

The next version is a copy of this one with one more migration: an index of the events, and a
column that this version does not know. Clients ask for lists and post events all the time, and
repeat nothing. Meanwhile

1. the next version upgrades the database, and an old server is stopped and started again;
2. next servers replace the old ones, one by one;
3. old servers replace the next ones, one by one;
4. the next version downgrades the database.

Every request must succeed, and at each moment a server has to be ready.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import numpy as np

from app.core.migrations import head_revision
from benchmarks.faults.setup import SMALL, WAIT_SECONDS, Storage, add_events, storage, train
from benchmarks.harness import publish
from tests.cluster.process import ROOT, environment_with, wait_until
from tests.cluster.servers import NcrServer, NcrWorker, ProxyServer, get_status, ncr_command

CLIENTS = 4
PAUSE_SECONDS = 0.01
NEXT_REVISION = "9999"
NEXT_MIGRATION = '''
"""What the next version adds."""

import sqlalchemy as sa
from alembic import op

from app.core.migrations import create_index_concurrently

revision = "{revision}"
down_revision = "{head}"
compatible_from = "{head}"
branch_labels = None
depends_on = None


def upgrade():
    create_index_concurrently("ix_events_type", "events", ["type"])
    op.add_column("events", sa.Column("note", sa.Text, nullable=True))
    op.add_column("items", sa.Column("note", sa.Text, nullable=True))


def downgrade():
    op.drop_column("items", "note")
    op.drop_column("events", "note")
    op.drop_index("ix_events_type", "events")
'''
OLD, NEXT = "this", "next"
LONG = ((1, OLD), (2, NEXT), (2, OLD))
"""How many servers are replaced, by which version, between upgrade and downgrade."""
SHORT = ((1, OLD), (1, NEXT), (1, OLD))
COLUMNS = [
    "rounds", "replacements", "lists", "events", "failed", "lost", "counted twice",
    "looks", "looks without a ready server",
]  # fmt: skip


def next_version(folder: Path) -> Path:
    """A checkout of the next version."""
    for package in ("app", "ncr_core", "migrations"):
        shutil.copytree(ROOT / package, folder / package)
    text = NEXT_MIGRATION.format(revision=NEXT_REVISION, head=head_revision())
    (folder / "migrations" / "versions" / f"{NEXT_REVISION}_next.py").write_text(text.lstrip())
    return folder


def change_schema(place: Storage, checkout: Path, command: str) -> None:
    """`ncr db upgrade` or `ncr db downgrade` of a version."""
    subprocess.run(
        [*ncr_command("migrate")[:-1], command],
        env=environment_with(place.env(PYTHONPATH=str(checkout))),
        cwd=checkout,
        timeout=120,
        check=True,
    )


class Load:
    """Clients that ask for lists and post events, and a look at each server's readiness."""

    def __init__(self, url: str, ports: list[int]) -> None:
        self.lists = 0
        self.events = 0
        self.failures: list[str] = []
        self.looks = 0
        self.looks_without_server = 0
        self.seconds: list[tuple[float, float]] = []
        """When a request ended, and how long it took."""
        self._url = url
        self._ports = ports
        self._stop = threading.Event()
        self._threads = [
            *(threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)),
            threading.Thread(target=self._look),
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: int) -> None:
        users = sorted({user for user, _, _ in SMALL.interactions})
        number = 0
        with httpx2.Client(base_url=self._url, timeout=30) as http:
            while not self._stop.wait(PAUSE_SECONDS):
                number += 1
                started = time.perf_counter()
                try:
                    if number % 2:
                        answer = http.get(f"/recommend/{users[number % len(users)]}")
                        good = answer.status_code == 200 and len(answer.json()["items"]) == 10
                        self.lists += good
                    else:
                        event = {"event_id": f"load {client} {number}", "user": f"u{client}"}
                        answer = http.post("/events", json=event | {"item": "film-1"})
                        good = answer.status_code == 200 and answer.json()["accepted"] == 1
                        self.events += good
                    if not good:
                        self.failures.append(answer.text)
                except httpx2.TransportError as error:
                    self.failures.append(repr(error))
                ended = time.perf_counter()
                self.seconds.append((ended, ended - started))

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.looks += 1
            ready = [get_status(port, "/health/ready") == 200 for port in self._ports]
            self.looks_without_server += not any(ready)

    def p99(self, since: float, until: float) -> float:
        """The 99th percentile of the requests that ended in between, in milliseconds."""
        return float(np.percentile([s for at, s in self.seconds if since < at < until], 99)) * 1e3


@contextlib.contextmanager
def _running(place: Storage, ports: list[int], model: bool) -> Iterator[list[NcrServer]]:
    env = place.env(NCR_MODEL_POLL_SECONDS="0.2", NCR_PRECOMPUTE_USERS="0")
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(2):
            server = NcrServer(env, place.folder / f"server-{number}.log")
            servers.append(stack.enter_context(server))
            ports.append(server.port)
        add_events(servers[0].url)
        if model:
            client = stack.enter_context(httpx2.Client(base_url=servers[0].url, timeout=30))
            with NcrWorker(env, place.folder / "worker.log"):
                train(client, *(server.url for server in servers))
        yield servers


def _replace(servers: list[NcrServer], checkout: Path) -> None:
    """Stops one server after the other and starts this version in its place."""
    for server in servers:
        if server.terminate() != 0:
            raise AssertionError(server.log_text())
        server.start_from(checkout)
        # As whoever replaces servers does: the balancer has to see it before the next one goes.
        time.sleep(1.0)


def run(
    rounds: int, plan: Sequence[tuple[int, str]] = LONG, *, model: bool = True
) -> tuple[Counter[str], dict[str, float]]:
    """The figures by the names of the columns, and the 99th percentiles in milliseconds."""
    ports: list[int] = []
    figures: Counter[str] = Counter(dict.fromkeys(COLUMNS, 0))
    with (
        storage("postgresql") as place,
        _running(place, ports, model) as servers,
        ProxyServer(ports, place.folder / "proxy.log") as proxy,
    ):
        later = next_version(place.folder / "next")
        with Load(proxy.url, ports) as load:
            steady = time.perf_counter()
            time.sleep(2.0)
            changing = time.perf_counter()
            for turn in range(rounds):
                change_schema(place, later, "upgrade")
                revision = place.query("SELECT version_num FROM alembic_version")
                if revision != [(NEXT_REVISION,)]:
                    raise AssertionError(revision)
                for number, version in plan:
                    _replace(servers[:number], later if version == NEXT else ROOT)
                    figures["replacements"] += number
                change_schema(place, later, "downgrade")
                figures["rounds"] += 1
                print(f"{turn + 1}/{rounds}", load.lists, load.events, load.failures, flush=True)
            wait_until(lambda: get_status(ports[0], "/health/ready") == 200, WAIT_SECONDS, "ready")
            ended = time.perf_counter()
        stored = place.query("SELECT count(*) FROM events WHERE event_id LIKE 'load %'")[0][0]
        figures.update(
            {
                "lists": load.lists,
                "events": load.events,
                "failed": len(load.failures),
                "lost": max(0, load.events - stored),
                "counted twice": max(0, stored - load.events - len(load.failures)),
                "looks": load.looks,
                "looks without a ready server": load.looks_without_server,
            }
        )
        p99 = {
            "steady_p99_ms": load.p99(steady, changing),
            "changing_p99_ms": load.p99(changing, ended),
        }
    return figures, p99


def main(rounds: int = 5) -> None:
    started = time.perf_counter()
    figures, p99 = run(rounds)
    seconds = round(time.perf_counter() - started)
    row = [figures[column] for column in COLUMNS]
    more = {name: round(value, 1) for name, value in p99.items()}
    publish("faults-rolling-upgrade", COLUMNS, [row], clients=CLIENTS, seconds=seconds, **more)
