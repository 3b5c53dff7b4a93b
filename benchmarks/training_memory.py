"""The peak of memory of two training jobs, one after the other, by the number of events.

    python -m benchmarks.training_memory [SCRATCH [EVENTS ...]]

A database on SQLite has so many events (`World`), one user for every 20, and 20,000 items. Both
jobs train the recipe `next-item-nbpr` with 64 factors for one epoch, because more epochs take no
more memory. The gate compares the second model with the first, which is served by then. The peak is
that of the largest process of a job (Linux). The last column is what the peak grew by since the
next smaller number of events, divided by the events that came. `EVENT_BYTES` of
`app/training/reader.py` is to be at least `SURPLUS` times as large. SCRATCH is a folder with room
for the largest database (12 million events: 3 GB).

All events are likes of equal weight, and the users' vectors are part of the figures. Events of
several weights, or preferences, take more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, run_command
from benchmarks.ingest import World, own_place
from benchmarks.size import EVENTS_A_USER, run

EVENTS, ITEMS = (6_000_000, 12_000_000), 20_000  # above what the baselines are fitted to
PARAMS = {"recipe": "next-item-nbpr", "factors": 64, "epochs": 1, "force": True}
MAX_SECONDS = 7_200.0
TRAININGS = ("first", "second")
PROGRAM = "from app.cli.main import main; main()"


def trained(folder: Path, world: World) -> list[list[Any]]:
    """Name and peak in MiB of each training on so many events."""
    # Without a job for candidates between the two trainings.
    settings = {"NCR_DATA_DIR": str(folder), "NCR_DATABASE_URL": "", "NCR_PRECOMPUTE_USERS": "0"}
    env = os.environ | settings
    file = folder / "events.parquet"
    world.write(file)
    run(["-c", PROGRAM, "import", str(file)], env, MAX_SECONDS)
    file.unlink()
    command = ["-m", "benchmarks.size", "step", "train", json.dumps(PARAMS)]
    rows = []
    for name in TRAININGS:
        _, peak, outcome = run(command, env, MAX_SECONDS)
        if outcome != "succeeded":
            raise SystemExit(f"the {name} training on {world.events:,} events {outcome}")
        rows.append([name, peak])
    return rows


def main(scratch: Path = Path("var/training_memory"), events: tuple[int, ...] = EVENTS) -> None:
    columns = ["events", "training", "peak MiB", "B an event"]
    rows: list[list[Any]] = []
    before: dict[str, tuple[int, float]] = {}
    for size in sorted(set(events or EVENTS)):
        with own_place(scratch / str(size), "sqlite", ""):
            for name, peak in trained((scratch / str(size)).resolve(), world_of(size)):
                grown = None
                if name in before:
                    smaller, less = before[name]
                    grown = round((peak - less) * 2**20 / (size - smaller), 1)
                rows.append([size, name, round(peak), grown])
                before[name] = size, peak
                publish("training_memory", columns, rows, items=ITEMS, params=PARAMS)


def world_of(events: int) -> World:
    """The synthetic data of so many events."""
    return World(events, events // EVENTS_A_USER, ITEMS)


if __name__ == "__main__":
    run_command(main)
