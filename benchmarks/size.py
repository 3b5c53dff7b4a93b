"""What grows with the data: time and memory of start, upkeep and training, by events and items.

    python -m benchmarks.size [SCRATCH [CELL_SECONDS [DATABASE_URL [EVENTS_X_ITEMS ...]]]]
    python -m benchmarks.size data FOLDER EVENTS_X_ITEMS [CATEGORIES [PARAMS]]

A cell is a database with so many events (`World`), one user for every 20, and so many items, as in
`5000000x100000`; without any, 1, 5 and 20 million events by 10,000, 100,000 and 1,000,000 items
are measured, each on SQLite and, with the URL of a server, on PostgreSQL. SCRATCH is a folder with
room for the largest database (20 million events: 5 GB). Each step of a cell is a process of its
own, whose peak of memory counts:

import      `ncr import` of a Parquet file
count       the recount of popularity
snapshot    the matrix of interactions, read from the database by way of files
train       a training job: the next-item model, from which most others of `auto` start, with the
            factors that `auto` gives it at this size
candidates  the candidates of the 10,000 most active users
start       a server from its start until it is ready; its memory after 5 seconds of lists for
            random users, each asked for once, by 8 connections

The result `size` is written after every step, with the processor of the machine, as the cells may
come from several; cells that it has are not measured again. A step that is not done CELL_SECONDS
(3,600) after its cell began is left out, and so are those that follow.

The second form makes the data folder of a service on SQLite, with a model. PARAMS are the body of
`POST /admin/train` that trains it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, published, run_command
from benchmarks.ingest import World, own_place
from benchmarks.load import closed_loop, requests_for, server_in_place
from ncr_core.recipes import auto_recipes
from ncr_core.reproduction.results_store import provenance

EVENTS = (1_000_000, 5_000_000, 20_000_000)
ITEMS = (10_000, 100_000, 1_000_000)
EVENTS_A_USER = 20
PRECOMPUTED = 10_000
LISTS, CONNECTIONS, LIST_SECONDS = 40_000, 8, 5.0
COLUMNS = ["database", "events", "items", "step", "seconds", "peak MiB", "note", "cpu"]


def count() -> str:
    """The recount of popularity, with nothing else in the process."""
    from app.core.settings import load_settings
    from app.recommend.popularity import PopularityRanking
    from app.wiring import build_services

    async def work() -> str:
        services = await build_services(load_settings())
        started = time.perf_counter()
        ranked = await PopularityRanking(services.events).ranked(1)
        seconds = time.perf_counter() - started
        await services.close()
        return f"{len(ranked)} items in {seconds:.1f} s"

    return asyncio.run(work())


def snapshot() -> str:
    """What a training reads."""
    from app.core.settings import load_settings
    from app.events.training_snapshot import take_snapshot

    settings = load_settings()
    started = time.perf_counter()
    with take_snapshot(settings, settings.trainings_folder) as taken:
        made = taken.interactions()
    return f"read in {time.perf_counter() - started:.1f} s, {made.nnz} interactions"


def params_of(world: World) -> str:
    """The body of `POST /admin/train` for the next-item model."""
    first = auto_recipes(world.users, world.items, world.events)[0]
    wanted = {"recipe": first.name, "factors": first.model.factors, "force": True}
    return json.dumps(wanted)


def train(params: str) -> str:
    """A training job, from the queue to the published version."""
    from app.jobs.schemas import TrainParams

    return _job(TrainParams.model_validate_json(params))


def candidates() -> str:
    """The job that the training has left."""
    return _job(None)


def _job(params: Any) -> str:
    from app.core.settings import load_settings
    from app.wiring import build_services
    from app.worker.worker import Worker

    async def work() -> str:
        services = await build_services(load_settings())
        if params is not None:
            await services.jobs.submit_training(params)
        worker = Worker(services.database, services.models, services.settings)
        await worker.run_once()
        jobs, _ = await services.jobs.page(None, 2)
        job = next(job for job in jobs if job.status not in ("queued", "running"))
        await services.close()
        return f"{job.status}: {job.error}" if job.error else str(job.status)

    return asyncio.run(work())


STEPS: dict[str, Callable[[str], str]] = {
    "count": lambda _: count(),
    "snapshot": lambda _: snapshot(),
    "train": train,
    "candidates": lambda _: candidates(),
}


def step(name: str, params: str) -> None:
    """One step, in this process."""
    print(STEPS[name](params))


class OutOfTimeError(Exception):
    """The time of a cell is over."""


def peak_bytes(pid: int) -> int:
    """The largest memory that a process, or one that it has started, has held so far (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):  # it has just ended
        return 0
    return max([own, *(peak_bytes(int(child)) for child in children)])


def run(command: list[str], env: dict[str, str], seconds: float) -> list[Any]:
    """Seconds, peak of memory in MiB and last line of a process."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        if time.monotonic() - started > seconds:
            process.kill()
            process.wait()
            raise OutOfTimeError
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    assert process.stdout is not None
    note = next((line for line in reversed(process.stdout.read().splitlines()) if line), "")
    return [time.monotonic() - started, peak / 2**20, note]


def steps(world: World, folder: Path, url: str, until: float) -> Iterator[list[Any]]:
    """Measures one cell, step by step."""
    settings = {"NCR_DATA_DIR": str(folder), "NCR_DATABASE_URL": url, "NCR_LOG_LEVEL": "error"}
    settings["NCR_PRECOMPUTE_USERS"] = str(PRECOMPUTED)
    env = os.environ | settings
    file = folder / "events.parquet"
    world.write(file)
    program = "from app.cli.main import main; main()"
    importing = run(["-c", program, "import", str(file)], env, until - time.monotonic())
    file.unlink()
    yield ["import", *importing]
    for name in STEPS:
        command = ["-m", "benchmarks.size", "step", name, params_of(world)]
        yield [name, *run(command, env, until - time.monotonic())]
    started = time.perf_counter()
    with server_in_place(folder, database_url=url) as running:
        ready = time.perf_counter() - started
        idle = running.rss / 2**20
        # Each is asked for once: a second time the list would come from the cache.
        users = random.Random(0).sample(range(world.users), min(LISTS, world.users))
        asked = iter(requests_for(running.url, [f"/recommend/user-{n}" for n in users]))
        report = asyncio.run(closed_loop(running.url, asked, CONNECTIONS, LIST_SECONDS))
        note = f"{idle:.0f} MiB when ready; lists never asked for: {report.rate():.0f} a second"
        yield ["start", ready, running.rss / 2**20, note]


def data(folder: Path, cell: str, categories: int = 2_000, params: str = "") -> None:
    """Makes the data folder of a service on SQLite with a model, for other benchmarks."""
    events, items = map(int, cell.split("x"))
    source = folder / "source"
    source.mkdir(parents=True)
    world = World(events, events // EVENTS_A_USER, items)
    world.write(source / "events.parquet")
    world.write_items(source / "items.csv", categories)
    env = os.environ | {"NCR_DATA_DIR": str(folder), "NCR_DATABASE_URL": ""}
    program = "from app.cli.main import main; main()"
    train_step = ["-m", "benchmarks.size", "step", "train", params or params_of(world)]
    for command in (["-c", program, "import", str(source)], train_step):
        subprocess.run([sys.executable, *command], env=env, check=True)
    shutil.rmtree(source)


def main(
    scratch: Path = Path("var/size"),
    cell_seconds: float = 3_600.0,
    server_url: str = "",
    cells: tuple[str, ...] = (),
) -> None:
    sizes = [tuple(map(int, cell.split("x"))) for cell in cells]
    sizes = sizes or [(events, items) for events in EVENTS for items in ITEMS]
    rows = [list(row.values()) for row in published().get("size", {"rows": []})["rows"]]
    kinds = ["sqlite", *(["postgresql"] if server_url else [])]
    cpu = provenance()["machine"]["cpu"]
    for (events, items), kind in ((size, kind) for size in sizes for kind in kinds):
        if any(row[:3] == [kind, events, items] for row in rows):
            continue
        until = time.monotonic() + cell_seconds
        folder = scratch / f"{kind}-{events}x{items}"
        with own_place(folder, kind, server_url) as url:
            world = World(events, events // EVENTS_A_USER, items)
            try:
                for result in steps(world, folder, url, until):
                    rows.append([kind, events, items, *result, cpu])
                    publish("size", COLUMNS, rows, cell_seconds=cell_seconds)
            except OutOfTimeError:
                rows.append([kind, events, items, "the rest", None, None, "out of time", cpu])
                publish("size", COLUMNS, rows, cell_seconds=cell_seconds)


if __name__ == "__main__":
    run_command(main, step=step, data=data)
