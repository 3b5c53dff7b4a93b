"""Memory of the server and of the training, with five million events taken over HTTP.

Events of 200,000 users and 20,000 items, popular ones more often, in lists of 10,000; then one pass
of NBPR with 8 factors over all of them, and for some minutes lists for users at random while events
of theirs come in, with caches so small that they are full after the first minute. On SQLite.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.faults.setup import ENDED, storage
from benchmarks.harness import publish
from tests.cluster.servers import NcrServer, NcrWorker

USERS, ITEMS, ROWS, CLIENTS, LOADERS = 200_000, 20_000, 10_000, 2, 8
# Full within a minute: what grows after that is no cache.
CACHES = {
    "NCR_LIST_CACHE_BYTES": str(8 * 2**20),
    "NCR_CANDIDATE_CACHE_BYTES": str(8 * 2**20),
    "NCR_PROFILE_CACHE_BYTES": str(4 * 2**20),
}
COLUMNS = ["after", "seconds", "a second", "server MiB", "server's peak MiB", "training's peak MiB"]


def _mebibytes(pid: int, name: str) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024 if name in status else 0.0


async def _ingest(base: str, events: int) -> None:
    choose = np.random.default_rng(0)
    numbers = iter(range(events // ROWS))

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=base, timeout=120) as http:
            for n in numbers:
                users = choose.integers(0, USERS, ROWS).tolist()
                items = (ITEMS * choose.random(ROWS) ** 3).astype(int).tolist()
                rows = [
                    {"event_id": f"{n}-{i}", "user": f"user-{u}", "item": f"item-{v}"}
                    for i, (u, v) in enumerate(zip(users, items, strict=True))
                ]
                body = json.dumps(rows)
                headers = {"Content-Type": "application/json"}
                answer = await http.post("/events", content=body, headers=headers)
                answer.raise_for_status()
                if answer.json()["accepted"] != ROWS:
                    raise AssertionError(answer.text[:500])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def run(events: int, minutes: int) -> list[list[Any]]:
    rows: list[list[Any]] = []
    with storage("sqlite") as place:
        env = place.env(NCR_MODEL_POLL_SECONDS="0.2", **CACHES)
        with (
            NcrServer(env, place.folder / "server.log") as server,
            httpx2.Client(base_url=server.url, timeout=120) as client,
        ):
            peak = 0.0

            def note(after: str, seconds: float, count: int | None) -> None:
                rate = None if count is None else count / seconds
                now, most = (_mebibytes(server.pid, name) for name in ("VmRSS", "VmHWM"))
                rows.append([after, seconds, rate, now, most, peak or None])
                print(rows[-1], flush=True)

            note("start", 0.0, None)
            started = time.perf_counter()
            asyncio.run(_ingest(server.url, events))
            note(f"{events:,} events taken", time.perf_counter() - started, events)
            started = time.perf_counter()
            with NcrWorker(env, place.folder / "worker.log") as worker:
                order = {"model": "nbpr", "factors": 8, "epochs": 1, "force": True}
                client.post("/admin/train", json=order).raise_for_status()
                while True:
                    time.sleep(0.2)
                    peak = max([peak, *(_mebibytes(p, "VmHWM") for p in worker.training_pids())])
                    jobs = client.get("/admin/jobs").json()["items"]
                    if all(job["status"] in ENDED for job in jobs):
                        break
            if any(job["status"] != "succeeded" for job in jobs):
                raise AssertionError(jobs)
            version = jobs[-1]["model_version"]
            while client.get("/recommend/user-1").json()["model_version"] != version:
                time.sleep(0.1)
            note("a model trained and loaded", time.perf_counter() - started, None)
            for minute in range(minutes):
                started = time.perf_counter()
                lists = _request_lists(server.url, 60.0, minute)
                note(f"minute {minute + 1} of load", time.perf_counter() - started, lists)
    return rows


def _request_lists(base: str, seconds: float, seed: int) -> int:
    """Lists from several clients at a time, every fiftieth after an event of that user."""
    until = time.perf_counter() + seconds
    counts = [0] * LOADERS

    def client(number: int) -> None:
        choose = np.random.default_rng([seed, number])
        with httpx2.Client(base_url=base, timeout=60) as http:
            while time.perf_counter() < until:
                user = f"user-{choose.integers(USERS)}"
                if counts[number] % 50 == 0:
                    event = {"user": user, "item": f"item-{choose.integers(ITEMS)}"}
                    http.post("/events", json=event).raise_for_status()
                http.get(f"/recommend/{user}").raise_for_status()
                counts[number] += 1

    with ThreadPoolExecutor(LOADERS) as pool:
        for done in [pool.submit(client, number) for number in range(LOADERS)]:
            done.result()
    return sum(counts)


def main(events: int = 5_000_000, minutes: int = 15) -> None:
    rows = run(events, minutes)
    publish("faults-memory", COLUMNS, rows, users=USERS, items=ITEMS, events=events, caches=CACHES)
