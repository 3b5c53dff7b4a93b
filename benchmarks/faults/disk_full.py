"""A disk that is full while SQLite commits and while a model is published (root only: it mounts).

The data folder is a small tmpfs that a ballast file fills. Events must be refused with a clear 503
and nothing half written; the old model goes on serving; a training fails with a clear error; and
with the ballast gone everything works again, without a restart.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from app.registry.checkpoint_store import MARK
from benchmarks.faults.setup import (
    LEASE,
    USER,
    Storage,
    add_events,
    has_ended,
    serves,
    submit,
    train,
    wait_for,
)
from benchmarks.harness import publish
from tests.cluster.process import temporary_folder
from tests.cluster.servers import NcrServer

MEBIBYTES = 48


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder with room for some megabytes."""
    folder = temporary_folder("ncr-disk-")
    options = f"size={MEBIBYTES}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def may_mount() -> bool:
    """Whether this process may mount at all."""
    try:
        with small_disk():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def fill(folder: Path, *, leave: int = 0) -> Path:
    """A file that takes all the room there is but ``leave`` bytes."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    if leave:
        os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast


def run() -> list[list[Any]]:
    """A row for each of the two moments."""
    with small_disk() as folder, contextlib.ExitStack() as stack:
        place = Storage(folder)
        logs = temporary_folder("ncr-disk-logs-")
        stack.callback(shutil.rmtree, logs, ignore_errors=True)
        server = NcrServer(place.env(**LEASE), logs / "server.log", with_worker=True)
        stack.enter_context(server)
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        add_events(server.url)
        version = train(client, server.url)
        committing = _while_committing(client, place)
        return [committing, _while_publishing(client, place, server.url, version)]


def _while_committing(client: httpx2.Client, place: Storage) -> list[Any]:
    ballast = fill(place.folder)
    refused = 0
    acknowledged: list[str] = []
    for n in range(200):
        rows = [{"event_id": f"full-{n}-{i}", "user": f"x{n}", "item": "film-1"} for i in range(50)]
        answer = client.post("/events", json=rows)
        if answer.status_code == 200:
            acknowledged += [row["event_id"] for row in rows]
            continue
        assert answer.status_code == 503, answer.text
        assert answer.json()["code"] == "storage_unavailable", answer.text
        assert "Retry-After" in answer.headers
        refused += 1
        if refused == 20:
            break
    lists = client.get(f"/recommend/{USER}").status_code
    ballast.unlink()
    after = client.post("/events", json={"event_id": "after", "user": "x", "item": "film-1"})
    stored_rows = place.query("SELECT event_id FROM events WHERE event_id LIKE 'full-%'")
    stored = {row[0] for row in stored_rows}
    lost, left = set(acknowledged) - stored, stored - set(acknowledged)
    return [
        "SQLite commits", refused, len(acknowledged), len(lost), len(left), lists == 200,
        after.json().get("accepted") == 1, place.damage(),
    ]  # fmt: skip


def _while_publishing(client: httpx2.Client, place: Storage, url: str, version: str) -> list[Any]:
    # Room for the rows of the job, not for a checkpoint of this size.
    ballast = fill(place.folder, leave=2 * 2**20)
    job_id = submit(client, model="dncr", factors=96, layers=4, epochs=1)
    job = wait_for(client, job_id, has_ended)
    still_served = serves(url, version)
    models = place.folder / "var" / "models"
    left = [path.name for path in models.iterdir() if path.name != MARK]
    assert job["status"] == "failed", job
    assert "space" in job["error"], job
    ballast.unlink()
    train(client, url)
    print("publishing:", job["error"], left, flush=True)
    return ["a model is published", 1, 0, 0, len(left) - 1, still_served, True, place.damage()]


COLUMNS = [
    "disk full while", "refused", "acknowledged", "of them lost", "left behind",
    "old model served", "works again", "damage",
]  # fmt: skip


def main() -> None:
    if not may_mount():
        sys.exit("this needs to mount a tmpfs: run it as root")
    publish("faults-disk-full", COLUMNS, run(), mebibytes=MEBIBYTES)
