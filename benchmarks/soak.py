"""A server under load while models are swapped: errors, latencies, memory, delay of a change.

    python -m benchmarks.soak DATA_DIR [SECONDS]
    python -m benchmarks.soak lifecycle DATA_DIR [ROUNDS]

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on a copy, with a server, a worker and this client on the same cores.

Soak: full load, by default for ten minutes. Two versions are trained first. Half of the requests
are for lists that may be cached, half exclude items at random and are ranked anew; every second,
events of known users come in.

Lifecycle: trainings, the gate, publishing and roll-back by HTTP while requests come at a fixed
rate: of ten four are for plain lists, four exclude an item, and two post an event. Each round
trains with another seed, waits for what the gate decides, rolls back, and activates the new version
again. The trainings are short, and the gate's margin is wide, so that there is something to
publish.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import orjson

from benchmarks.harness import publish, run_command
from benchmarks.load import Report, Server, closed_loop, open_loop, requests_for, server
from benchmarks.recommend import users_with_lists

CONNECTIONS = 32
SWAP_SECONDS = 30
RATE = 150.0
# Full within the first minutes: what grows after that is no cache.
CACHES = {
    "list_cache_bytes": 24 * 2**20,
    "candidate_cache_bytes": 8 * 2**20,
    "profile_cache_bytes": 4 * 2**20,
}
GATE_MARGIN = "0.5"  # so quick a training is no match for what the demo has trained


@contextmanager
def worker(running: Server, **env: str) -> Iterator[None]:
    """`ncr worker` on the server's data."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ncr")), "worker"],
        env={
            **os.environ,
            "NCR_DATA_DIR": str(running.data_dir),
            "NCR_LOG_LEVEL": "warning",
            **env,
        },
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def train(client: httpx2.AsyncClient, order: dict[str, Any]) -> dict[str, Any]:
    """Trains through the queue; the job once it has ended, whether it published or not."""
    queued = (await client.post("/admin/train", json=order)).raise_for_status().json()
    while True:
        job: dict[str, Any] = (await client.get(f"/admin/jobs/{queued['job_id']}")).json()
        others = (await client.get("/admin/jobs")).json()["items"]
        if all(one["status"] not in ("queued", "running") for one in (job, *others)):
            break
        await asyncio.sleep(0.1)
    if job["status"] not in ("succeeded", "rejected"):
        sys.exit(f"training {job['status']}: {job['error']}")
    return job


def mixed_requests(url: str, users: list[str], items: list[str], posts: int = 0) -> Iterator[bytes]:
    """Of ten requests so many post events; half of the others exclude an item."""
    rng = random.Random(0)
    head = f"POST /events HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    for n in cycle(range(10)):
        user, item = rng.choice(users), rng.choice(items)
        if n < 10 - posts:
            query = f"?exclude={item}" if n % 2 else ""
            yield requests_for(url, [f"/recommend/{user}{query}"])[0]
        else:
            content = orjson.dumps({"user": user, "item": item})
            more = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            yield (head + more).encode() + content


async def soak(running: Server, seconds: int) -> list[list[Any]]:
    """A row for each swap."""
    users = await users_with_lists(running.url)
    async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
        items = [i["id"] for i in (await client.get("/items?n=1000")).json()["items"]]
        order = {"model": "neupr", "factors": 8, "epochs": 1}
        versions = []
        with worker(running):
            for seed in (1, 2):
                job = await train(client, order | {"seed": seed})
                versions.append(job["model_version"] or sys.exit("the gate has rejected a model"))
        mixed = mixed_requests(running.url, users, items)
        requests = cycle([next(mixed) for _ in range(20_000)])
        posting = asyncio.create_task(_post_events(client, users, items))
        rows: list[list[Any]] = []
        for turn in range(max(1, seconds // SWAP_SECONDS)):
            path = f"/admin/models/{versions[turn % 2]}/activate"
            (await client.post(path)).raise_for_status()
            report = await closed_loop(
                running.url, requests, CONNECTIONS, SWAP_SECONDS, warm_up=0.0
            )
            statuses = report.statuses
            failures = statuses.total() - statuses[200] - statuses[503]
            quantiles = [report.quantile(q) for q in (0.5, 0.99, 1.0)]
            mebibytes = running.rss / 2**20
            after = (turn + 1) * SWAP_SECONDS
            rows.append([after, report.rate(), *quantiles, statuses[503], failures, mebibytes])
            print(rows[-1], flush=True)
        posting.cancel()
    return rows


async def _post_events(client: httpx2.AsyncClient, users: list[str], items: list[str]) -> None:
    rng = random.Random(1)
    while True:
        events = [{"user": rng.choice(users), "item": rng.choice(items)} for _ in range(5)]
        (await client.post("/events", json=events)).raise_for_status()
        await asyncio.sleep(1)


async def _seconds_until_served(client: httpx2.AsyncClient, user: str, version: str) -> float:
    started = time.perf_counter()
    while True:
        response = await client.get(f"/recommend/{user}?n=1")
        seconds = time.perf_counter() - started
        if response.json()["model_version"] == version:
            return seconds
        if seconds > SWAP_SECONDS:
            sys.exit(f"{version} is not served")
        await asyncio.sleep(0.02)


async def _one_round(client: httpx2.AsyncClient, seed: int, user: str) -> dict[str, Any]:
    """Trains, and where the gate let the version pass rolls back and activates it again."""
    before = (await client.get(f"/recommend/{user}?n=1")).json()["model_version"]
    started = time.perf_counter()
    job = await train(client, {"model": "nbpr", "epochs": 4, "seed": seed})
    figures = {"status": job["status"], "seconds": time.perf_counter() - started}
    if job["status"] == "rejected":
        return figures
    version = job["model_version"]
    figures["published"] = await _seconds_until_served(client, user, version)
    back = (await client.post("/admin/models/rollback")).raise_for_status().json()["version"]
    if back != before:
        sys.exit(f"rolled back to {back} and not to {before}")
    figures["back"] = await _seconds_until_served(client, user, back)
    (await client.post(f"/admin/models/{version}/activate")).raise_for_status()
    figures["forth"] = await _seconds_until_served(client, user, version)
    return figures


async def run_lifecycle(running: Server, rounds: int) -> tuple[list[dict[str, Any]], Report]:
    """The figures of each round, and all answers that came meanwhile."""
    users = await users_with_lists(running.url)
    total = Report(0.0)
    async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
        items = [item["id"] for item in (await client.get("/items?n=1000")).json()["items"]]

        async def load() -> None:
            mixed = mixed_requests(running.url, users, items, posts=2)
            while True:
                part = await open_loop(running.url, mixed, RATE, 5.0, 64, warm_up=0.0)
                total.seconds += part.seconds
                for status, latencies in part.latencies.items():
                    total.latencies.setdefault(status, []).extend(latencies)

        loading = asyncio.create_task(load())
        figures = [await _one_round(client, seed, users[0]) for seed in range(1, rounds + 1)]
        await asyncio.sleep(5)
        loading.cancel()
    return figures, total


def main(data_dir: Path, seconds: int = 600) -> None:
    with server(data_dir, **CACHES) as running:
        rows = asyncio.run(soak(running, seconds))
    publish(
        "soak",
        ["seconds", "200s/s", "p50 ms", "p99 ms", "max ms", "503s", "errors", "MiB"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        swap_seconds=SWAP_SECONDS,
        caches=CACHES,
    )


def lifecycle(data_dir: Path, rounds: int = 5) -> None:
    with server(data_dir) as running, worker(running, NCR_GATE_MARGIN=GATE_MARGIN):
        figures, report = asyncio.run(run_lifecycle(running, rounds))
    outcomes = Counter(one["status"] for one in figures)
    names = ("published", "back", "forth")
    swaps = [one[name] for one in figures for name in names if name in one]
    answers = report.statuses.total()
    quantiles = [report.quantile(q) for q in (0.5, 0.99, 1.0)]
    publish(
        "lifecycle",
        ["rounds", "published", "rejected", "swaps", "longest swap s", "requests", "other than 200",
         "p50 ms", "p99 ms", "max ms"],
        [[rounds, outcomes["succeeded"], outcomes["rejected"], len(swaps), max(swaps, default=0.0),
          answers, answers - report.statuses[200], *quantiles]],
        data=data_dir.name,
        rate=RATE,
        rounds_in_full=figures,
        statuses={str(status): n for status, n in report.statuses.items()},
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main, lifecycle=lifecycle)
