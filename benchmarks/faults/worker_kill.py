"""SIGKILL of workers at random points of training and publishing; SIGSTOP past the lease.

    python -m benchmarks.faults.worker_kill [ROUNDS]

Two workers, one of which is killed each round, half of the time while it trains and half while it
publishes; the other one takes the job up, if it had not ended. In the last rounds a worker is
stopped for longer than its lease while it trains, and then goes on: it must publish nothing, and
its training must have ended before the other worker's began.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks.faults.databases import KINDS, place, upgrade
from benchmarks.faults.training import (
    LEASE,
    SECONDS,
    Watch,
    add_events,
    check_models,
    has_ended,
    start_pair,
    submit,
    wait_for,
)
from benchmarks.report import publish
from deploy.processes import NcrWorker
from deploy.topology import close_all

STOPS = 5
PUBLISHING = 0.08  # seconds from the first file of a model until it is served, or a little less
COMMIT_SECONDS = 0.2
COLUMNS = [
    "database", "kills", "stops", "jobs", "succeeded", "held when killed", "taken up again",
    "given up", "most trainings at once", "half published", "served and unknown",
    "published twice", "failed answers",
]  # fmt: skip


class Killed(NamedTuple):
    """A round in which a worker was killed."""

    job: dict[str, Any]
    """As it ended."""
    held: bool
    """Whether the worker had it in its hands still, and had not written its end."""


def _trainer(workers: list[NcrWorker]) -> NcrWorker | None:
    return next((w for w in workers if w.running and w.training_pids()), None)


def _holder(workers: list[NcrWorker], job_id: str) -> NcrWorker:
    """Who has taken the job, by what it says."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for worker in workers:
            if worker.running and job_id in worker.log_text():
                return worker
        time.sleep(0.01)
    raise AssertionError(f"nobody takes {job_id}")


def _wait_for_files(models: Path, but: set[str]) -> None:
    """Until there is something new in the folder of models: at once, or it is done by then."""
    until = time.monotonic() + SECONDS
    while _names(models) <= but:
        if time.monotonic() > until:
            raise AssertionError("nothing is written")
        time.sleep(0.001)


def _names(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} if models.exists() else set()


def _start_all(workers: list[NcrWorker]) -> None:
    for worker in workers:
        if not worker.running:
            worker.start()


def kill_one(
    client: httpx2.Client, workers: list[NcrWorker], models: Path, *, within: float | None
) -> Killed:
    """A round: its worker is killed at most so many seconds after it began to write the model; with
    None, while it trains.
    """
    _start_all(workers)
    before = _names(models)
    job_id = submit(client, seed=random.randrange(1000))
    victim = _holder(workers, job_id)
    if within is None:
        time.sleep(random.uniform(0, 3))
    else:
        _wait_for_files(models, before)
        time.sleep(random.uniform(0, within))
    victim.kill()
    time.sleep(COMMIT_SECONDS)  # PostgreSQL brings to an end what it was told before
    held = wait_for(client, job_id, lambda _: True)["status"] == "running"
    killed = Killed(wait_for(client, job_id, has_ended), held)
    if held and killed.job["attempt"] < 2:
        raise AssertionError(f"nobody has taken up {killed.job}")
    return killed


def stop_one(client: httpx2.Client, workers: list[NcrWorker]) -> dict[str, Any]:
    """A round with a worker that sleeps past its lease and wakes with a model in its hands."""
    _start_all(workers)
    job_id = submit(client, seed=random.randrange(1000))
    # Its process needs longer than the lease to be done, wherever it is stopped on the way.
    victim = None
    until = time.monotonic() + 60
    while victim is None and time.monotonic() < until:
        victim = _trainer(workers)
    if victim is None:
        raise AssertionError("nobody trains")
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
    kind: str,
    kills: int,
    stops: int,
    lease: str = LEASE["NCR_JOB_LEASE_SECONDS"],
    tries: int = 1,
) -> list[Any]:
    """All rounds on one kind of database; a row of the table.

    A worker that is killed too late, when its job has ended, is one kill more: with ``tries`` there
    is another one, up to so many in all and each time sooner.
    """
    killed: list[Killed] = []
    stopped: list[dict[str, Any]] = []
    with ExitStack() as stack:
        where = stack.enter_context(place(kind))
        upgrade(where)
        env = where.env(**LEASE | {"NCR_JOB_LEASE_SECONDS": lease})
        server, workers = start_pair(env, where.folder)
        models = where.folder / "var" / "models"
        stack.callback(close_all, [server, *workers])
        for process in (server, *workers):
            process.start(wait=False)
        for process in (server, *workers):
            process.wait_ready()
        add_events(server.url)
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        with Watch(server.url, lambda: workers) as watch:
            for turn in range(kills):
                for again in range(tries):
                    within = PUBLISHING / 2**again if turn % 2 == 0 else None
                    killed.append(kill_one(client, workers, models, within=within))
                    job, held = killed[-1]
                    ended = job["status"], job["attempt"], job["error"]
                    print(kind, turn + 1, f"held: {held}", *ended, flush=True)
                    if held:
                        break
            for _ in range(stops):
                stopped.append(stop_one(client, workers))
                print(kind, "stopped", stopped[-1]["status"], stopped[-1]["attempt"], flush=True)
        found = check_models(client, watch)
        left = [name for name in _names(models) if name.startswith(".")]
        jobs = [*(each.job for each in killed), *stopped]
        succeeded = sum(job["status"] == "succeeded" for job in jobs)
        again = sum(job["attempt"] > 1 for job in jobs)
        if any(not has_ended(job) for job in jobs):
            raise AssertionError("a job did not end")
        print(kind, "left over:", left, watch.failures[:1], flush=True)
    return [
        kind, len(killed), stops, len(jobs), succeeded, sum(each.held for each in killed), again,
        len(jobs) - succeeded, watch.most_at_once, *found.values(),
    ]  # fmt: skip


def main(kills: int) -> None:
    started = time.perf_counter()
    rows = [run(kind, kills, STOPS) for kind in KINDS]
    seconds = round(time.perf_counter() - started)
    publish("faults-worker-kill", COLUMNS, rows, lease_seconds=2, seconds=seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
