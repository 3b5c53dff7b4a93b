"""A service of several million users: its training, its checkpoint and its server, by two versions.

    python -m benchmarks.many_users SCRATCH OLD_CHECKOUT [EVENTS [USERS [ITEMS]]]

By default 12 million events of 4 million users on 10,000 items. Many of these users have no event,
as activity follows a power law. SCRATCH is a folder with room for the database on SQLite and the
files of a training (8 GB). Each version has a copy of the same database, and no model yet. The
training is the recipe `next-item` with 64 factors, which makes the
vectors of all users that a model keeps. Each step is a process of its own:

train       a training job; its peak of memory
checkpoint  the size of the files that servers read
server      a server from its start until it is ready; its memory after 5 seconds of lists for
            random users, each asked for once, by 8 connections
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, run_command
from benchmarks.ingest import World
from benchmarks.one_process import commit_of
from benchmarks.size import run

PARAMS = {"recipe": "next-item", "factors": 64, "force": True}
PROGRAM = "from app.cli.main import main; main()"
MAX_SECONDS = 7_200.0
COLUMNS = ["commit", "users with events", "step", "seconds", "MiB", "note"]
# It has to run with the service of an older checkout.
SERVER = """
import asyncio, json, random, sys, time
from pathlib import Path
from benchmarks.load import closed_loop, requests_for, server_in_place

folder, users = Path(sys.argv[1]), int(sys.argv[2])
started = time.perf_counter()
with server_in_place(folder, database_url="") as running:
    ready, idle = time.perf_counter() - started, running.rss / 2**20
    asked = random.Random(0).sample(range(users), 40_000)
    requests = iter(requests_for(running.url, [f"/recommend/user-{n}" for n in asked]))
    report = asyncio.run(closed_loop(running.url, requests, 8, 5.0))
    note = f"{idle:.0f} MiB when ready; lists never asked for: {report.rate():.0f} a second"
    print(json.dumps([ready, running.rss / 2**20, note]))
"""


def main(
    scratch: Path,
    old: Path,
    events: int = 12_000_000,
    users: int = 4_000_000,
    items: int = 10_000,
) -> None:
    imported = scratch.resolve() / "imported"
    imported.mkdir(parents=True)
    file = scratch.resolve() / "events.parquet"
    World(events, users, items).write(file)
    settings = {"NCR_DATABASE_URL": "", "NCR_LOG_LEVEL": "error", "NCR_PRECOMPUTE_USERS": "0"}
    env = os.environ | settings | {"NCR_DATA_DIR": str(imported)}
    subprocess.run([sys.executable, "-c", PROGRAM, "import", str(file)], env=env, check=True)
    file.unlink()
    rows: list[list[Any]] = []
    new = Path.cwd()
    for checkout in (old.resolve(), new):
        os.chdir(checkout)  # the first place where Python looks for a module
        folder = scratch.resolve() / commit_of(checkout)
        shutil.copytree(imported, folder)
        env["NCR_DATA_DIR"] = str(folder)
        env["PYTHONPATH"] = str(checkout)
        command = ["-m", "benchmarks.size", "step", "train", json.dumps(PARAMS)]
        seconds, peak, note = run(command, env, MAX_SECONDS)
        (path,) = (folder / "models").glob("*/manifest.json")
        manifest = json.loads(path.read_text())
        size = sum(file["bytes"] for file in manifest["files"].values())
        served = subprocess.run(
            [sys.executable, "-c", SERVER, str(folder), str(users)],
            env=env, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        trained = manifest.get("trained_users", manifest["n_users"])
        stored = f"vectors of {manifest['n_users']:,} users"
        steps = (
            ["train", seconds, peak, note],
            ["checkpoint", None, size / 2**20, stored],
            ["server", *json.loads(served.stdout.splitlines()[-1])],
        )
        rows += [[commit_of(checkout), trained, *step] for step in steps]
        os.chdir(new)
        shutil.rmtree(folder)
        publish("many_users", COLUMNS, rows, events=events, users=users, items=items, params=PARAMS)


if __name__ == "__main__":
    run_command(main)
