"""The snapshot in parts of a whole database: seconds, rows a second and memory of `ncr snapshot`.

    python -m benchmarks.snapshot [SCRATCH [DATABASE_URL [EVENTS]]]

A database has 20,000,000 events (`World`), one user for every 20, and 100,000 items. The benchmark
runs on SQLite and, with the URL of a server, on PostgreSQL. SCRATCH is a folder with room for the
database and the snapshot (20 million events: 6 GB). The seconds are those of the whole command from
its start, and the peak is that of its process (Linux).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, run_command
from benchmarks.ingest import World, own_place
from benchmarks.size import EVENTS_A_USER, run
from ncr_core.data.snapshot import MANIFEST, Snapshot

EVENTS, ITEMS = 20_000_000, 100_000
MAX_SECONDS = 7_200.0
COLUMNS = ["database", "events", "seconds", "events/s", "peak MiB", "parts", "MB"]
PROGRAM = "from app.cli.main import main; main()"


def measured(kind: str, folder: Path, url: str, world: World) -> list[Any]:
    """One row: imports the events, and writes the snapshot."""
    settings = {"NCR_DATA_DIR": str(folder), "NCR_DATABASE_URL": url, "NCR_LOG_LEVEL": "error"}
    env = os.environ | settings
    file = folder / "events.parquet"
    world.write(file)
    run(["-c", PROGRAM, "import", str(file)], env, MAX_SECONDS)
    file.unlink()
    written = folder / "snapshot"
    seconds, peak, _ = run(["-c", PROGRAM, "snapshot", str(written)], env, MAX_SECONDS)
    manifest = Snapshot.open(written).manifest
    size = sum(path.stat().st_size for path in written.iterdir() if path.name != MANIFEST)
    parts = len(manifest.parts)
    return [kind, world.events, seconds, world.events / seconds, peak, parts, size / 1e6]


def main(scratch: Path = Path("var/snapshot"), server_url: str = "", events: int = EVENTS) -> None:
    world = World(events, events // EVENTS_A_USER, ITEMS)
    rows = []
    for kind in ("sqlite", *(["postgresql"] if server_url else [])):
        folder = scratch / kind
        with own_place(folder, kind, server_url) as url:
            rows.append(measured(kind, folder.resolve(), url, world))
        publish("snapshot", COLUMNS, rows, items=ITEMS, users=world.users)


if __name__ == "__main__":
    run_command(main)
