"""SIGKILL of workers at random points of training and publishing; SIGSTOP past the lease.

Two workers, one of which is killed each round, half of the time while it trains and half while it
publishes; the other one takes the job up, if it had not ended. In the last rounds a worker is
stopped for longer than its lease while it trains, and then goes on: it must publish nothing, and
its training must have ended before the other worker's began.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks.faults.setup import (
    LEASE,
    WAIT_SECONDS,
    Watcher,
    add_events,
    has_ended,
    side_by_side,
    storage,
    submit,
    wait_for,
)
from benchmarks.harness import publish
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker
from tests.cluster.topology import close_all

STOPS = 5
TRAINING_SECONDS = 3.0
PUBLISHING_SECONDS = 0.08  # from the first file of a model until it is served, or less
COMMIT_SECONDS = 0.2
PEAK = "most trainings at once"
COLUMNS = [
    "database", "kills", "stops", "jobs", "succeeded", "held when killed", "taken up again",
    "given up", PEAK, "half published", "served and unknown",
    "published twice", "failed answers",
]  # fmt: skip


class KillRound(NamedTuple):
    """A round in which a worker was killed: its ended job, and whether the worker held it then."""

    job: dict[str, Any]
    held: bool


def _holder(workers: list[NcrWorker], job_id: str) -> NcrWorker:
    """The worker that has taken the job, by its log."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        for worker in workers:
            if worker.running and job_id in worker.log_text():
                return worker
        time.sleep(0.01)
    raise AssertionError(f"nobody takes {job_id}")


def _names(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} if models.exists() else set()


def _submit(client: httpx2.Client, workers: list[NcrWorker]) -> str:
    for worker in workers:
        if not worker.running:
            worker.start()
    return submit(client, seed=random.randrange(1000))


def kill_one(
    client: httpx2.Client,
    workers: list[NcrWorker],
    models: Path,
    *,
    within: float | None,
    loops: int = 1,
) -> KillRound:
    """Kills the worker at most so many seconds after it began to write the model; with None, while
    it trains.
    """
    before = _names(models)
    job_id = _submit(client, workers)
    victim = _holder(workers, job_id)
    if within is None:
        time.sleep(random.uniform(0, TRAINING_SECONDS * loops))
    else:
        until = time.monotonic() + WAIT_SECONDS
        while _names(models) <= before:
            if time.monotonic() > until:
                raise AssertionError("nothing is written")
            time.sleep(0.001)  # or it is published by then
        time.sleep(random.uniform(0, within))
    victim.kill()
    time.sleep(COMMIT_SECONDS)  # PostgreSQL ends transactions that were on their way
    held = wait_for(client, job_id, lambda _: True)["status"] == "running"
    job = wait_for(client, job_id, has_ended)
    if held and job["attempt"] < 2:
        raise AssertionError(f"nobody has taken up {job}")
    return KillRound(job, held)


def stop_one(client: httpx2.Client, workers: list[NcrWorker]) -> dict[str, Any]:
    """Stops a worker past its lease while it trains; the ended job."""
    job_id = _submit(client, workers)
    # Its process needs longer than the lease, wherever it is stopped on the way.
    wait_until(lambda: any(w.running and w.training_pids() for w in workers), 60, "a training")
    victim = next(w for w in workers if w.running and w.training_pids())
    time.sleep(random.uniform(0, 1.5))
    victim.pause()
    # Until the lease is over and the other one has begun. On SQLite one that was stopped just while
    # it wrote holds the file's lock until it goes on.
    with suppress(AssertionError):
        wait_for(client, job_id, lambda job: job["attempt"] == 2 or has_ended(job), seconds=20)
    victim.resume()
    job = wait_for(client, job_id, has_ended)
    time.sleep(1)  # for whatever the one that woke might still do
    return job


def run(
    database: str,
    kills: int,
    stops: int,
    lease: str = LEASE["NCR_JOB_LEASE_SECONDS"],
    tries: int = 1,
    loops: int = 1,
    forked: bool = False,
) -> list[Any]:
    """All rounds on one kind of database; a row of the table.

    ``loops`` is how many others run at the same time: a training takes as many times longer.

    A worker that is killed too late, when its job has ended, is one kill more: with ``tries`` there
    is another one, up to so many in all and each time sooner.
    """
    rounds: list[KillRound] = []
    stopped: list[dict[str, Any]] = []
    with ExitStack() as stack:
        place = stack.enter_context(storage(database))
        env = place.env(**LEASE | {"NCR_JOB_LEASE_SECONDS": lease})
        server = NcrServer(env, place.folder / "server.log")
        workers = [NcrWorker(env, place.folder / f"worker-{n}.log") for n in (1, 2)]
        for process in (server, *workers):
            process.forked = forked
        models = place.folder / "var" / "models"
        stack.callback(close_all, [server, *workers])
        for process in (server, *workers):
            process.start(wait=False)
        for process in (server, *workers):
            process.wait_ready()
        add_events(server.url)
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        with Watcher(server.url, workers) as watcher:
            for turn in range(kills):
                for again in range(tries):
                    within = PUBLISHING_SECONDS / 2**again if turn % 2 == 0 else None
                    rounds.append(kill_one(client, workers, models, within=within, loops=loops))
                    job, held = rounds[-1]
                    ended = job["status"], job["attempt"], job["error"]
                    print(database, turn + 1, f"held: {held}", *ended, flush=True)
                    if held:
                        break
            for _ in range(stops):
                stopped.append(stop_one(client, workers))
                print(database, "stopped", stopped[-1]["status"], stopped[-1]["attempt"])
        faults = watcher.check_models(client)
        left = [name for name in _names(models) if name.startswith(".")]
        print(database, "left over:", left, watcher.failures[:1], flush=True)
    jobs = [*(each.job for each in rounds), *stopped]
    if not all(map(has_ended, jobs)):
        raise AssertionError("a job did not end")
    succeeded = sum(job["status"] == "succeeded" for job in jobs)
    return [
        database, len(rounds), stops, len(jobs), succeeded, sum(each.held for each in rounds),
        sum(job["attempt"] > 1 for job in jobs), len(jobs) - succeeded, watcher.max_trainings,
        *faults.values(),
    ]  # fmt: skip


def _sum(rows: list[list[Any]]) -> list[Any]:
    """One row of those of several loops."""
    columns = zip(COLUMNS[1:], *(row[1:] for row in rows), strict=True)
    sums = [(max if name == PEAK else sum)(values) for name, *values in columns]
    return [rows[0][0], *sums]


def main(kills: int = 30, loops: int = 1) -> None:
    started = time.perf_counter()
    # A loop beside others needs a longer lease: a worker that waits for a core is not lost.
    lease = str(2 + 2 * (loops > 1))
    one = partial(run, stops=max(1, STOPS // loops), lease=lease, loops=loops, forked=True)
    rows = [_sum(each) for each in side_by_side(one, kills, loops).values()]
    seconds = round(time.perf_counter() - started)
    publish(
        "faults-worker-kill", COLUMNS, rows, lease_seconds=int(lease), loops=loops, seconds=seconds
    )
