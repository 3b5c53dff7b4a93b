"""SIGKILL of workers at random points of training and publishing; SIGSTOP past the lease.

    python -m benchmarks.faults.worker_kill [ROUNDS]

Two workers, one of which is killed each round while it trains, half of the time just when it is
about to publish; the other one takes the job up. In the last rounds a worker is stopped for longer
than its lease while it trains, and then goes on: it must publish nothing, and its training must
have ended before the other worker's began.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

import httpx2

from benchmarks.faults.databases import KINDS, place, upgrade
from benchmarks.faults.training import (
    LEASE,
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

STOPS = 5
COLUMNS = [
    "database", "kills", "stops", "jobs", "succeeded", "taken up again", "given up",
    "most trainings at once", "half published", "served and unknown", "published twice",
    "failed answers",
]  # fmt: skip


def _owner(workers: list[NcrWorker]) -> NcrWorker | None:
    return next((w for w in workers if w.running and w.training_pids()), None)


def kill_one(client: httpx2.Client, workers: list[NcrWorker], *, late: bool) -> dict[str, Any]:
    """A round: the job as it ended."""
    job_id = submit(client, seed=random.randrange(1000))
    wait_for(client, job_id, lambda job: job["status"] == "running")
    if late:
        phases = ("evaluate", "learn the held-out items", "write checkpoint")
        wait_for(
            client,
            job_id,
            lambda job: has_ended(job) or (job["progress"] or {}).get("phase") in phases,
        )
        time.sleep(random.uniform(0, 0.4))
    else:
        time.sleep(random.uniform(0, 3))
    victim = _owner(workers) or random.choice(workers)
    victim.kill()
    job = wait_for(client, job_id, has_ended)
    victim.start()
    return job


def stop_one(client: httpx2.Client, workers: list[NcrWorker]) -> dict[str, Any]:
    """A round with a worker that sleeps past its lease and wakes with a model in its hands."""
    job_id = submit(client, seed=random.randrange(1000))
    # Its process needs longer than the lease to be done, wherever it is stopped on the way.
    victim = None
    until = time.monotonic() + 60
    while victim is None and time.monotonic() < until:
        victim = _owner(workers)
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
    kind: str, kills: int, stops: int, lease: str = LEASE["NCR_JOB_LEASE_SECONDS"]
) -> list[Any]:
    """All rounds on one kind of database; a row of the table."""
    jobs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        where = stack.enter_context(place(kind))
        upgrade(where)
        env = where.env(**LEASE | {"NCR_JOB_LEASE_SECONDS": lease})
        server, workers = start_pair(env, where.folder)
        for process in (server, *workers):
            stack.enter_context(process)
        add_events(server.url)
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        with Watch(server.url, lambda: workers) as watch:
            for turn in range(kills):
                jobs.append(kill_one(client, workers, late=turn % 2 == 0))
                last = jobs[-1]
                print(kind, turn + 1, last["status"], last["attempt"], last["error"], flush=True)
            for _ in range(stops):
                jobs.append(stop_one(client, workers))
                print(kind, "stopped", jobs[-1]["status"], jobs[-1]["attempt"], flush=True)
        found = check_models(client, watch)
        left = [p.name for p in (where.folder / "var" / "models").glob(".*")]
        succeeded = sum(job["status"] == "succeeded" for job in jobs)
        again = sum(job["attempt"] > 1 for job in jobs)
        if any(not has_ended(job) for job in jobs):
            raise AssertionError("a job did not end")
        print(kind, "left over:", left, watch.failures[:1], flush=True)
    return [
        kind, kills, stops, len(jobs), succeeded, again, len(jobs) - succeeded,
        watch.most_at_once, *found.values(),
    ]  # fmt: skip


def main(kills: int) -> None:
    started = time.perf_counter()
    rows = [run(kind, kills, STOPS) for kind in KINDS]
    seconds = round(time.perf_counter() - started)
    publish("faults-worker-kill", COLUMNS, rows, lease_seconds=2, seconds=seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
