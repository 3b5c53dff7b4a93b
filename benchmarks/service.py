"""What one server does over HTTP, beside a route that does nothing, in the same run.

    python -m benchmarks.service DATA_DIR

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on a copy. A closed loop: each connection asks again when it has its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.report import publish

SECONDS = 6.0
CONNECTIONS = 8
LIST = 1_000


async def measure(base: str, ask: Callable[[httpx2.AsyncClient, int], Awaitable[Any]]) -> list[Any]:
    """Requests a second and latencies in ms of ``CONNECTIONS`` closed loops."""
    latencies: list[float] = []

    async def loop(number: int) -> None:
        async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
            n = number
            while time.perf_counter() < end:
                started = time.perf_counter()
                await ask(client, n)
                latencies.append(time.perf_counter() - started)
                n += CONNECTIONS

    end = time.perf_counter() + SECONDS
    await asyncio.gather(*(loop(number) for number in range(CONNECTIONS)))
    latencies.sort()
    rate = len(latencies) / SECONDS
    return [rate, latencies[len(latencies) // 2] * 1e3, latencies[len(latencies) * 99 // 100] * 1e3]


async def run(base: str) -> list[list[Any]]:
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        models = (await client.get("/admin/models")).json()["items"]
        if not models:
            sys.exit("this service has no model yet: run `make demo` first")
        events = (await client.get("/items", params={"n": 1000})).json()["items"]
    items = [item["id"] for item in events]
    users = await _users(base, items)
    run_id = time.time_ns()

    async def nothing(client: httpx2.AsyncClient, n: int) -> None:
        (await client.get("/health/live")).raise_for_status()

    async def recommend(client: httpx2.AsyncClient, n: int) -> None:
        (await client.get(f"/recommend/{users[n % len(users)]}")).raise_for_status()

    async def newcomer(client: httpx2.AsyncClient, n: int) -> None:
        (await client.get(f"/recommend/nobody-{n}")).raise_for_status()

    async def ingest(client: httpx2.AsyncClient, n: int) -> None:
        body = [
            {"event_id": f"b{run_id}-{n}-{i}", "user": f"u{i % 97}", "item": items[i % len(items)]}
            for i in range(LIST)
        ]
        answer = await client.post("/events", content=json.dumps(body), headers=JSON)
        assert answer.json()["accepted"] == LIST, answer.text

    rows = []
    for name, ask in (
        ("GET /health/live (nothing to do)", nothing),
        ("GET /recommend, known users", recommend),
        ("GET /recommend, unknown users", newcomer),
        (f"POST /events, lists of {LIST:,}", ingest),
    ):
        rows.append([name, *await measure(base, ask)])
    return rows


JSON = {"Content-Type": "application/json"}


async def _users(base: str, items: list[str]) -> list[str]:
    """Known users, found by asking: those who get a list from the model."""
    found = []
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        for prefix in ("", "user-"):
            for n in range(1, 200):
                answer = (await client.get(f"/recommend/{prefix}{n}?n=1")).json()
                if answer["items"] and answer["items"][0]["source"] == "model":
                    found.append(f"{prefix}{n}")
    if not found:
        sys.exit("no known users named N or user-N")
    return found


def main(data_dir: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        copy = Path(scratch) / "var"
        shutil.copytree(data_dir, copy)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        server = subprocess.Popen(
            ["ncr", "serve", "--port", str(port)],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "NCR_DATA_DIR": str(copy),
                "NCR_LOG_LEVEL": "warning",
            },
        )
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(base)
            rows = asyncio.run(run(base))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    publish(
        "service",
        ["what", "requests/s", "p50 ms", "p99 ms"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        seconds=SECONDS,
    )


def _wait(base: str) -> None:
    for _ in range(600):
        try:
            if httpx2.get(f"{base}/health/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    sys.exit("the server did not get ready")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
