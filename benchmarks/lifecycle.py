"""Trainings, the gate, publishing and going back by HTTP while requests run: what fails, and how
soon is a change served?

    python -m benchmarks.lifecycle DATA_DIR [ROUNDS]

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on a copy, with a server, a worker and this client on the same cores. Requests
come at a fixed rate: lists, most of them ranked anew, and events. Each round trains with another
seed, waits for what the gate says, goes back to the version before by one call, and forth again.
The trainings are short, and the gate's margin is wide, so that there is something to publish.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import orjson

from benchmarks.load import Report, open_loop, requests_for
from benchmarks.recommend import users_with_lists
from benchmarks.report import publish
from benchmarks.serving import Server, server

RATE = 150.0
ROUNDS = 5
SWAP_SECONDS = 30.0
QUICK = {"model": "nbpr", "epochs": 4}
MARGIN = "0.5"  # of the gate: so quick a training is no match for what the demo has trained


def requests(base: str, users: list[str], items: list[str]) -> Iterator[bytes]:
    """Of ten requests eight are for lists, half of these with an item excluded, and two post."""
    choose = random.Random(0)
    head = f"POST /events HTTP/1.1\r\nHost: {urlsplit(base).netloc}\r\n"
    while True:
        for n in range(10):
            user, item = choose.choice(users), choose.choice(items)
            if n < 8:
                query = f"?exclude={item}" if n % 2 else ""
                yield requests_for(base, [f"/recommend/{user}{query}"])[0]
            else:
                body = orjson.dumps({"user": user, "item": item})
                more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                yield (head + more).encode() + body


async def served(client: httpx2.AsyncClient, user: str, version: str) -> float:
    """Seconds until a list comes from this version."""
    started = time.perf_counter()
    while True:
        answer = await client.get(f"/recommend/{user}?n=1")
        if answer.json()["model_version"] == version:
            return time.perf_counter() - started
        if time.perf_counter() - started > SWAP_SECONDS:
            sys.exit(f"{version} is not served")
        await asyncio.sleep(0.02)


async def one_round(client: httpx2.AsyncClient, seed: int, user: str) -> dict[str, Any]:
    """Train, see what the gate says, and where a version was published go back and forth."""
    before = (await client.get(f"/recommend/{user}?n=1")).json()["model_version"]
    started = time.perf_counter()
    accepted = await client.post("/admin/train", json=QUICK | {"seed": seed})
    job = f"/admin/jobs/{accepted.raise_for_status().json()['job_id']}"
    while True:
        state = (await client.get(job)).json()
        if state["status"] not in ("queued", "running"):
            break
        await asyncio.sleep(0.1)
    found: dict[str, Any] = {"status": state["status"], "seconds": time.perf_counter() - started}
    if state["status"] == "rejected":
        return found
    if state["status"] != "succeeded":
        sys.exit(f"training {state['status']}: {state['error']}")
    version = state["model_version"]
    found["published"] = await served(client, user, version)
    back = (await client.post("/admin/models/rollback")).raise_for_status().json()["version"]
    if back != before:
        sys.exit(f"went back to {back} and not to {before}")
    found["back"] = await served(client, user, back)
    (await client.post(f"/admin/models/{version}/activate")).raise_for_status()
    found["forth"] = await served(client, user, version)
    return found


async def run(running: Server, rounds: int) -> tuple[list[dict[str, Any]], Report]:
    users = await users_with_lists(running.base)
    async with httpx2.AsyncClient(base_url=running.base, timeout=60) as client:
        items = [item["id"] for item in (await client.get("/items?n=1000")).json()["items"]]
        every = Report(0.0)

        async def load() -> None:
            mixed = requests(running.base, users, items)
            while True:
                part = await open_loop(running.base, mixed, RATE, 5.0, 64, warm_up=0.0)
                every.seconds += part.seconds
                for status, own in part.latencies.items():
                    every.latencies.setdefault(status, []).extend(own)

        loading = asyncio.create_task(load())
        found = [await one_round(client, seed, users[0]) for seed in range(1, rounds + 1)]
        await asyncio.sleep(5)
        loading.cancel()
    return found, every


def main(data_dir: Path, rounds: int) -> None:
    with server(data_dir) as running:
        ncr = str(Path(sys.executable).with_name("ncr"))
        worker = subprocess.Popen(
            [ncr, "worker"],
            env={
                **os.environ,
                "NCR_DATA_DIR": str(running.data_dir),
                "NCR_LOG_LEVEL": "warning",
                "NCR_GATE_MARGIN": MARGIN,
            },
        )
        try:
            found, report = asyncio.run(run(running, rounds))
        finally:
            worker.terminate()
            worker.wait(30)
    statuses = Counter(one["status"] for one in found)
    swaps = [one[name] for one in found for name in ("published", "back", "forth") if name in one]
    answers = sum(report.statuses.values())
    publish(
        "lifecycle",
        ["rounds", "published", "rejected", "swaps", "longest swap s", "requests", "other than 200",
         "p50 ms", "p99 ms", "max ms"],
        [[rounds, statuses["succeeded"], statuses["rejected"], len(swaps), max(swaps, default=0.0),
          answers, answers - report.statuses[200], report.quantile(0.5), report.quantile(0.99),
          report.quantile(1.0)]],
        data=data_dir.name,
        rate=RATE,
        rounds_in_full=found,
        statuses={str(status): n for status, n in report.statuses.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
