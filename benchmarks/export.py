"""Exports of everything: seconds, rows a second, memory of the child process, and a cancellation.

    python -m benchmarks.export [SCRATCH [DATABASE_URL [EVENTS [USERS [ITEMS]]]]]

A service with 1,000,000 events of 50,000 users and 10,000 items, and a model of them, exports all
tables and the list of every user by `POST /admin/export`, as JSON Lines and as Parquet; on SQLite
and, with the URL of a server, on PostgreSQL. The seconds of a table are those between the first
progress of it and of the next, as `GET /admin/jobs/{id}` shows them. The peak is that of the job's
child process (Linux). The last export of each database is cancelled amid its lists.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.faults.setup import ENDED
from benchmarks.harness import publish, run_command
from benchmarks.ingest import World, own_place
from benchmarks.size import peak_bytes
from tests.cluster.process import environment_with
from tests.cluster.servers import NcrServer, NcrWorker, ncr_command

EVENTS, USERS, ITEMS = 1_000_000, 50_000, 10_000
PLACES = 10
TRAINING = {"model": "nbpr", "factors": 8, "epochs": 3, "force": True}
BODY: dict[str, Any] = {"lists": {"n": PLACES}}
POLL_SECONDS = 0.1
COLUMNS = [
    "database", "format", "part", "rows", "MB", "seconds", "rows/s",
    "peak MiB", "progress reports", "files left",
]  # fmt: skip
Row = list[Any]


class Export:
    """A job, followed from its request to its end."""

    def __init__(self, client: httpx2.Client, worker: NcrWorker, body: dict[str, Any]) -> None:
        self._client, self._worker = client, worker
        self.started = time.perf_counter()
        answer = client.post("/admin/export", json=body)
        answer.raise_for_status()
        self.job_id: str = answer.json()["job_id"]
        self.began: dict[str, float] = {}
        """When each part was first seen, in seconds since the request."""
        self.reports: set[tuple[str, int]] = set()
        self.peak = 0

    def follow(self, until: str = "", places: int = 0) -> dict[str, Any]:
        """The job at its end, or once so many rows of a part are done."""
        while True:
            job: dict[str, Any] = self._client.get(f"/admin/jobs/{self.job_id}").json()
            self.peak = max([self.peak, *map(peak_bytes, self._worker.training_pids())])
            if job["status"] in ENDED:
                return job
            progress = job["progress"] or {"phase": "queued", "epoch": 0}
            phase, done = progress["phase"], progress["epoch"]
            self.began.setdefault(phase, self.seconds)
            self.reports.add((phase, done))
            if phase == until and done > places:
                return job
            time.sleep(POLL_SECONDS)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def exported(client: httpx2.Client, worker: NcrWorker, kind: str, form: str) -> Iterator[Row]:
    """The rows of one whole export."""
    export = Export(client, worker, BODY | {"format": form})
    job, seconds = export.follow(), export.seconds
    if job["status"] != "succeeded":
        sys.exit(f"the export {job['status']}: {job['error']}")
    times = [*sorted(export.began.items(), key=lambda pair: pair[1]), ("end", seconds)]
    parts = {name: after - at for (name, at), (_, after) in itertools.pairwise(times)}
    files = job["metrics"]["files"]
    for name in (*job["params"]["tables"], "lists"):
        file, took = files[f"{name}.{form}"], parts.get(name)
        rate = None if took is None else file["rows"] / took
        yield [kind, form, name, file["rows"], file["bytes"] / 1e6, took, rate, None, None, None]
    rows = sum(file["rows"] for file in files.values())
    size = sum(file["bytes"] for file in files.values()) / 1e6
    n = len(export.reports)
    peak = export.peak / 2**20
    yield [kind, form, "all", rows, size, seconds, rows / seconds, peak, n, None]


def cancelled(client: httpx2.Client, worker: NcrWorker, kind: str, folder: Path) -> Row:
    """The row of an export that is cancelled amid its lists."""
    export = Export(client, worker, BODY)
    export.follow("lists", PLACES)
    asked = export.seconds
    client.post(f"/admin/jobs/{export.job_id}/cancel").raise_for_status()
    job = export.follow()
    if job["status"] != "cancelled":
        sys.exit(f"the export {job['status']}: {job['error']}")
    seconds = export.seconds - asked
    time.sleep(1.0)  # the job has ended before its files are removed
    left = [path for path in folder.glob("var/models/exports/.*") if export.job_id in path.name]
    left += folder.glob(f"var/models/exports/{export.job_id}")
    peak = export.peak / 2**20
    reports = len(export.reports)
    return [kind, "jsonl", "cancelled", None, None, seconds, None, peak, reports, len(left)]


def measured(kind: str, folder: Path, url: str, world: World) -> Iterator[Row]:
    """All rows of a database."""
    env = {
        "NCR_DATA_DIR": str(folder / "var"),
        "NCR_DATABASE_URL": url,
        "NCR_PRECOMPUTE_USERS": "0",
    }
    source = folder / "source"
    source.mkdir(parents=True)
    world.write(source / "events.parquet")
    world.write_items(source / "items.csv", 100)
    command = [*ncr_command("worker")[:-1], "import", str(source)]
    subprocess.run(command, env=environment_with(env), check=True)
    shutil.rmtree(source)
    with (
        NcrServer(env, folder / "server.log") as server,
        NcrWorker(env, folder / "worker.log") as worker,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        job_id = client.post("/admin/train", json=TRAINING).json()["job_id"]
        while (job := client.get(f"/admin/jobs/{job_id}").json())["status"] not in ENDED:
            time.sleep(POLL_SECONDS)
        if job["status"] != "succeeded":
            sys.exit(f"the training {job['status']}: {job['error']}")
        for form in ("jsonl", "parquet"):
            yield from exported(client, worker, kind, form)
        yield cancelled(client, worker, kind, folder)


def main(
    scratch: Path = Path("var/export"),
    server_url: str = "",
    events: int = EVENTS,
    users: int = USERS,
    items: int = ITEMS,
) -> None:
    world = World(events, users, items)
    rows: list[Row] = []
    for kind in ("sqlite", *(["postgresql"] if server_url else [])):
        folder = scratch / kind
        with own_place(folder, kind, server_url) as url:
            rows += measured(kind, folder.resolve(), url, world)
        publish("export", COLUMNS, rows, events=events, users=users, items=items, places=PLACES)


if __name__ == "__main__":
    run_command(main)
