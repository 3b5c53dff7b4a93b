"""The service under test: a database of its own, small data, jobs over HTTP, and a watcher."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from benchmarks.harness import publish
from ncr_core.data.synthetic import synthetic_catalogue
from tests.cluster.process import environment_with, temporary_folder, wait_until
from tests.cluster.servers import NcrWorker, PostgresCluster, ncr_command

DATABASES = ("sqlite", "postgresql")
SMALL = synthetic_catalogue(60, 50, 12)
USER = SMALL.interactions[0][0]
LEASE = {
    "NCR_JOB_LEASE_SECONDS": "2",
    "NCR_JOB_POLL_SECONDS": "0.2",
    "NCR_MODEL_POLL_SECONDS": "0.2",
    "NCR_PRECOMPUTE_USERS": "0",
}
# By force: with so few users the gate may find any model worse, and this is not about that.
TRAINING: dict[str, Any] = {"model": "nbpr", "factors": 4, "epochs": 40, "force": True}
# For tests that stop it. It lasts: an epoch of batches of one interaction takes half a second, and
# a training that no longer improves goes on for some epochs.
LONG_TRAINING: dict[str, Any] = {"model": "dncr", "epochs": 1000, "batch_size": 1}
WAIT_SECONDS = 120.0  # the first model of a new checkout compiles its kernels
ENDED = ("succeeded", "failed", "cancelled", "rejected")


@dataclass(frozen=True)
class Storage:
    """The data folder and the database of a service; without a URL, SQLite in the folder."""

    folder: Path
    url: str | None = None

    def env(self, **more: str) -> dict[str, str]:
        """The service's settings."""
        env = {"NCR_DATA_DIR": str(self.folder / "var"), "NCR_LOG_FORMAT": "json"}
        if self.url is not None:
            env["NCR_DATABASE_URL"] = self.url
        return env | more

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a statement, by a connection of its own."""
        if self.url is not None:
            with psycopg.connect(self.url) as connection:
                return connection.execute(statement).fetchall()
        with contextlib.closing(sqlite3.connect(self.folder / "var" / "ncr.db")) as connection:
            return connection.execute(statement).fetchall()

    def damage(self) -> str:
        """What SQLite finds wrong with its file, or "none"."""
        check = "ok" if self.url is not None else str(self.query("PRAGMA integrity_check")[0][0])
        return "none" if check == "ok" else check


@contextlib.contextmanager
def storage(database: str) -> Iterator[Storage]:
    """A folder, and for `postgresql` a migrated database in a cluster; deleted at the end."""
    with contextlib.ExitStack() as stack:
        folder = temporary_folder("ncr-faults-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if database == "sqlite":
            yield Storage(folder)
            return
        cluster = stack.enter_context(PostgresCluster(folder / "postgres"))
        storage = Storage(folder, cluster.create_database("ncr"))
        subprocess.run(
            ncr_command("migrate"), env=environment_with(storage.env()), timeout=120, check=True
        )
        yield storage


def publish_sums(
    name: str, columns: list[str], run: Callable[[str, int], Counter[str]], rounds: int, **more: Any
) -> None:
    """Publishes the figures of so many rounds on each kind of database."""
    started = time.perf_counter()
    rows = []
    for database in DATABASES:
        figures = run(database, rounds)
        rows.append([database, *(figures[column] for column in columns)])
    seconds = round(time.perf_counter() - started)
    publish(name, ["database", *columns], rows, **more, seconds=seconds)


def add_events(url: str) -> None:
    """60 users of 50 items."""
    rows = [{"event_id": f"{u} {i}", "user": u, "item": i} for u, i, _ in SMALL.interactions]
    httpx2.post(f"{url}/events", json=rows, timeout=60).raise_for_status()


def submit(client: httpx2.Client, **params: Any) -> str:
    """Submits a training; the id of its job."""
    response = client.post("/admin/train", json=TRAINING | params)
    job_id: str = response.raise_for_status().json()["job_id"]
    return job_id


def wait_for(
    client: httpx2.Client,
    job_id: str,
    done: Callable[[dict[str, Any]], bool],
    seconds: float = WAIT_SECONDS,
) -> dict[str, Any]:
    """The job once ``done`` says so; AssertionError after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        job: dict[str, Any] = client.get(f"/admin/jobs/{job_id}").json()
        if done(job):
            return job
        if has_ended(job) or time.monotonic() > until:
            raise AssertionError(f"{'ended' if has_ended(job) else 'timeout'}: {job}")
        time.sleep(0.05)


def has_ended(job: dict[str, Any]) -> bool:
    return job["status"] in ENDED


def train(client: httpx2.Client, *urls: str, **params: Any) -> str:
    """A new version, once the servers at all these URLs serve it."""
    job = wait_for(client, submit(client, **params), has_ended)
    if job["status"] != "succeeded":
        raise AssertionError(job)
    version: str = job["model_version"]
    for url in urls:
        wait_until(partial(serves, url, version), WAIT_SECONDS, f"{version} at {url}")
    return version


def serves(url: str, version: str) -> bool:
    """Whether a list of this server is of this version."""
    response = httpx2.get(f"{url}/recommend/{USER}", timeout=30)
    return response.status_code == 200 and response.json()["model_version"] == version


class Watcher:
    """Polls all the time: versions in the lists, and how many trainings run side by side."""

    def __init__(self, url: str, workers: list[NcrWorker]) -> None:
        self.versions: set[str] = set()
        self.failures: list[str] = []
        self.max_trainings = 0
        """Trainings that ran side by side, by the processes of workers that live."""
        self._url = url
        self._workers = workers
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run) for run in (self._poll_lists, self._poll_trainings)
        ]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _poll_lists(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.wait(0.05):
                response = client.get(f"/recommend/{USER}")
                if response.status_code != 200 or len(response.json()["items"]) != 10:
                    self.failures.append(response.text)
                elif response.json()["model_version"] is not None:
                    self.versions.add(response.json()["model_version"])

    def _poll_trainings(self) -> None:
        while not self._stop.wait(0.05):
            running = sum(len(w.training_pids()) for w in self._workers if w.running)
            self.max_trainings = max(self.max_trainings, running)

    def check_models(self, client: httpx2.Client) -> dict[str, int]:
        """Counts faults of the registry and of what was served: all must be 0."""
        models = client.get("/admin/models?n=1000").json()["items"]
        jobs = {j["job_id"]: j for j in client.get("/admin/jobs?n=1000").json()["items"]}
        unfinished = [
            m
            for m in models
            if jobs[m["job_id"]]["status"] != "succeeded"
            or jobs[m["job_id"]]["model_version"] != m["version"]
        ]
        activations = [client.post(f"/admin/models/{m['version']}/activate") for m in models]
        damaged = [response for response in activations if response.status_code != 200]
        return {
            "half published": len(unfinished) + len(damaged),
            "served and unknown": len(self.versions - {m["version"] for m in models}),
            "published twice": len(models) - len({m["job_id"] for m in models}),
            "failed answers": len(self.failures),
        }
