"""The memory of three training jobs, one after the other, by the number of events.

    python -m benchmarks.training_memory [SCRATCH [EVENTS ...]]
    python -m benchmarks.training_memory ranks [SCRATCH [RECIPE [EVENTS ...]]]

A database on SQLite has so many events (`World`), one user for every 20, and 20,000 items. The
jobs train the recipe `next-item-nbpr` with 16 factors for one epoch, because more epochs take no
more memory. The gate compares the second and the third model with the served model. The third job
trains with two ranks, by the engine `torchrun`. SCRATCH is a folder with room for the largest
database and the files of a training (12 million events: 5 GB).

own MiB     the most memory of the job's own process that no file backs, sampled 20 times a second
            (Linux); the system can reclaim the maps of files
rank MiB    the same of the largest rank

The last columns are what the two grew by since the next smaller number of events, divided by the
events that came. For a rank these are the events of its own users. `EVENT_BYTES`, `JOB_EVENT_BYTES`
and `RANK_EVENT_BYTES` of `app/training/reader.py` are to be at least `SURPLUS` times as large.

``ranks`` measures one training with two ranks and nothing served, by default of the recipe
`als-nbpr`. The result has the name of the recipe.

All events are likes of equal weight, and the users are part of the figures. Events of several
weights, or preferences, take more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, run_command
from benchmarks.ingest import World, own_place
from benchmarks.rank_tables import own_bytes
from benchmarks.scale import of_command, of_ranks, watched
from benchmarks.size import EVENTS_A_USER, run, train

EVENTS, ITEMS = (6_000_000, 12_000_000), 20_000  # above what the baselines are fitted to
PARAMS: dict[str, Any] = {"recipe": "next-item-nbpr", "factors": 16, "epochs": 1, "force": True}
RANKS = 2
MAX_SECONDS = 7_200.0
TRAININGS = (("first", "local"), ("second", "local"), ("third", "torchrun"))
COLUMNS = ["events", "training", "engine", "own MiB", "rank MiB", "B an event", "B an event, rank"]
PROGRAM = "from app.cli.main import main; main()"


def trained(
    folder: Path,
    world: World,
    trainings: Sequence[tuple[str, str]] = TRAININGS,
    recipe: str = PARAMS["recipe"],
) -> list[list[Any]]:
    """Name and engine of each training on so many events, and what its process and a rank took."""
    # Without a job for candidates between the trainings.
    settings = {"NCR_DATA_DIR": str(folder), "NCR_DATABASE_URL": "", "NCR_PRECOMPUTE_USERS": "0"}
    env = os.environ | settings | {"NCR_TRAIN_RANKS": str(RANKS)}
    file = folder / "events.parquet"
    world.write(file)
    run(["-c", PROGRAM, "import", str(file)], env, MAX_SECONDS)
    file.unlink()
    rows = []
    for name, engine in trainings:
        command = [sys.executable, "-m", "benchmarks.training_memory", "train", recipe]
        (outcome,), peaks = watched(
            command,
            of_job,
            lambda pid: of_ranks(pid, own_bytes),
            env=env | {"NCR_TRAIN_ENGINE": engine},
        )
        if outcome != "succeeded":
            raise SystemExit(f"the {name} training on {world.events:,} events {outcome}")
        rows.append([name, engine, *(peak / 2**20 for peak in peaks)])
    return rows


def of_job(pid: int) -> int:
    """The memory of the job's own process that no file backs, in bytes."""
    return of_command(pid, b"child_process", own_bytes)


def main(scratch: Path = Path("var/training_memory"), events: tuple[int, ...] = EVENTS) -> None:
    measure(scratch, events, "training_memory", TRAININGS, PARAMS["recipe"])


def of_ranks_alone(
    scratch: Path = Path("var/training_memory"),
    recipe: str = "als-nbpr",
    events: tuple[int, ...] = EVENTS,
) -> None:
    measure(scratch, events, f"training_memory-{recipe}", (("first", "torchrun"),), recipe)


def measure(
    scratch: Path,
    events: Sequence[int],
    result: str,
    trainings: Sequence[tuple[str, str]],
    recipe: str,
) -> None:
    """Publishes the rows of all sizes."""
    rows: list[list[Any]] = []
    before: dict[str, tuple[int, list[float]]] = {}
    for size in sorted(set(events or EVENTS)):
        with own_place(scratch / str(size), "sqlite", ""):
            folder = (scratch / str(size)).resolve()
            measured = trained(folder, world_of(size), trainings, recipe)
        for name, engine, *peaks in measured:
            grown: list[float | None] = [None, None]
            if name in before:
                smaller, less = before[name]
                came = [size - smaller, (size - smaller) / RANKS]
                grown = [
                    round((peak - old) * 2**20 / more, 1) if peak else None
                    for peak, old, more in zip(peaks, less, came, strict=True)
                ]
            rows.append([size, name, engine, *(round(peak) or None for peak in peaks), *grown])
            before[name] = size, peaks
        publish(result, COLUMNS, rows, items=ITEMS, params=PARAMS | {"recipe": recipe})


def world_of(events: int) -> World:
    """The synthetic data of so many events."""
    return World(events, events // EVENTS_A_USER, ITEMS)


def job(recipe: str) -> None:
    """A training job; prints its outcome."""
    print(json.dumps([train(json.dumps(PARAMS | {"recipe": recipe}))]))


if __name__ == "__main__":
    run_command(main, ranks=of_ranks_alone, train=job)
