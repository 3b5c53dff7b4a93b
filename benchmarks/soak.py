"""Full load for ten minutes while models are swapped: errors, latencies and memory.

    python -m benchmarks.soak DATA_DIR [SECONDS]

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on a copy. Two versions are trained first, by a worker. Half of the requests are
for lists that may be cached, half exclude items at random and are ranked anew; every second, events
of known users come in.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.load import Report, closed_loop, requests_for
from benchmarks.recommend import users_with_lists
from benchmarks.report import publish
from benchmarks.serving import Server, server

CONNECTIONS = 32
SWAP_SECONDS = 30
KEPT_REQUESTS = 20_000
# Full within the first minutes: what grows after that is no cache.
CACHES = {
    "list_cache_bytes": 24 * 2**20,
    "candidate_cache_bytes": 8 * 2**20,
    "profile_cache_bytes": 4 * 2**20,
}


def two_versions(running: Server) -> list[str]:
    """Trains two models on the same data, with their candidates; the second is active."""
    worker = subprocess.Popen(
        [str(Path(sys.executable).with_name("ncr")), "worker"],
        env={**os.environ, "NCR_DATA_DIR": str(running.data_dir), "NCR_LOG_LEVEL": "warning"},
    )
    versions = []
    try:
        with httpx2.Client(base_url=running.base, timeout=60) as client:
            for seed in (1, 2):
                order = {"model": "neupr", "factors": 8, "epochs": 1, "seed": seed}
                job = f"/admin/jobs/{client.post('/admin/train', json=order).json()['job_id']}"
                while True:
                    time.sleep(1)
                    jobs = client.get("/admin/jobs").json()["items"]
                    if all(one["status"] not in ("queued", "running") for one in jobs):
                        break
                state = client.get(job).json()
                if state["status"] != "succeeded":
                    sys.exit(f"training {state['status']}: {state['error']}")
                versions.append(state["model_version"])
    finally:
        worker.terminate()
        worker.wait(30)
    return versions


def mixed_requests(base: str, users: list[str], items: list[str]) -> Iterator[bytes]:
    """Half of them plain, half with an item excluded."""
    choose = random.Random(0)
    plain = [f"/recommend/{user}" for user in users]
    other = [
        f"/recommend/{choose.choice(users)}?exclude={choose.choice(items)}"
        for _ in range(KEPT_REQUESTS)
    ]
    both = [
        requests_for(base, [choose.choice(plain) if n % 2 else other[n]])[0]
        for n in range(KEPT_REQUESTS)
    ]
    n = 0
    while True:
        yield both[n % len(both)]
        n += 1


async def soak(running: Server, versions: list[str], seconds: int) -> list[list[Any]]:
    """A row for each swap."""
    users = await users_with_lists(running.base)
    async with httpx2.AsyncClient(base_url=running.base, timeout=60) as client:
        items = [i["id"] for i in (await client.get("/items?n=1000")).json()["items"]]
        requests = mixed_requests(running.base, users, items)
        posting = asyncio.create_task(_post_events(client, users, items))
        rows: list[list[Any]] = []
        for turn in range(max(1, seconds // SWAP_SECONDS)):
            answer = await client.post(f"/admin/models/{versions[turn % 2]}/activate")
            answer.raise_for_status()
            report: Report = await closed_loop(
                running.base, requests, CONNECTIONS, SWAP_SECONDS, warm_up=0.0
            )
            failed = sum(n for status, n in report.statuses.items() if status not in (200, 503))
            rows.append(
                [
                    (turn + 1) * SWAP_SECONDS,
                    report.rate(),
                    report.quantile(0.5),
                    report.quantile(0.99),
                    report.quantile(1.0),
                    report.statuses[503],
                    failed,
                    running.rss / 2**20,
                ]
            )
            print(rows[-1], flush=True)
        posting.cancel()
    return rows


async def _post_events(client: httpx2.AsyncClient, users: list[str], items: list[str]) -> None:
    choose = random.Random(1)
    while True:
        events = [{"user": choose.choice(users), "item": choose.choice(items)} for _ in range(5)]
        (await client.post("/events", json=events)).raise_for_status()
        await asyncio.sleep(1)


def main(data_dir: Path, seconds: int) -> None:
    with server(data_dir, **CACHES) as running:
        rows = asyncio.run(soak(running, two_versions(running), seconds))
    publish(
        "soak",
        ["seconds", "200s/s", "p50 ms", "p99 ms", "max ms", "503s", "errors", "MiB"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        swap_seconds=SWAP_SECONDS,
        caches=CACHES,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 600)
