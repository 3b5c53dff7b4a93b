"""How many lists a second one server gives, cached and ranked anew, and what it does under more
load than it can take.

    python -m benchmarks.recommend DATA_DIR

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on copies. The client runs beside the server, on the same cores.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from benchmarks.harness import publish, run_command
from benchmarks.load import Report, closed_loop, open_loop, requests_for, server

SECONDS = 5.0
ROUNDS = 3
CONNECTIONS = 32
USERS = 1_000


async def users_with_lists(base: str) -> list[str]:
    """Known users: those who get a list from the model. Their candidates are cached by then."""
    users: list[str] = []
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        for prefix in ("", "user-"):
            for n in range(1, 10_000):
                answer = (await client.get(f"/recommend/{prefix}{n}")).json()
                if not answer["items"] or answer["items"][0]["source"] != "model":
                    break
                users.append(f"{prefix}{n}")
                if len(users) == USERS:
                    return users
    if not users:
        sys.exit("no known users named 1, 2, 3 … or user-1, user-2 …")
    return users


async def answer_bytes(base: str, users: list[str]) -> int:
    """The mean size of an answer."""
    async with httpx2.AsyncClient(base_url=base) as client:
        sizes = [len((await client.get(f"/recommend/{user}")).content) for user in users[:50]]
    return sum(sizes) // len(sizes)


def row(name: str, reports: list[Report], beside: float | None = None) -> list[Any]:
    """Medians over the rounds."""
    rate = median(report.rate() for report in reports)
    refused = median(report.rate(503) for report in reports)
    others = sum(
        n for report in reports for status, n in report.statuses.items() if status not in (200, 503)
    )
    return [
        name,
        rate,
        None if beside is None else rate / beside,
        median(report.quantile(0.5) for report in reports),
        median(report.quantile(0.99) for report in reports),
        refused,
        others,
    ]


async def cached(base: str) -> list[list[Any]]:
    """The same 1,000 lists over and over, in turns with routes that do nothing."""
    users = await users_with_lists(base)
    size = await answer_bytes(base, users)
    paths_by_name = {
        f"nothing, {size:,} bytes": ["/noop?bytes=" + str(size)],
        "nothing, a route of FastAPI": ["/noop-fastapi"],
        "/recommend, cached": [f"/recommend/{user}" for user in users],
        "/recommend, unknown users": [f"/recommend/nobody-{n}" for n in range(USERS)],
    }
    reports: dict[str, list[Report]] = {name: [] for name in paths_by_name}
    for _ in range(ROUNDS):
        for name, paths in paths_by_name.items():
            requests = cycle(requests_for(base, paths))
            reports[name].append(await closed_loop(base, requests, CONNECTIONS, SECONDS))
    beside = median(report.rate() for report in reports[next(iter(paths_by_name))])
    return [row(name, its_reports, beside) for name, its_reports in reports.items()]


async def anew(base: str) -> list[list[Any]]:
    """No list is kept, candidates are: every request is ranked."""
    users = await users_with_lists(base)
    requests = cycle(requests_for(base, [f"/recommend/{user}" for user in users]))
    closed = [await closed_loop(base, requests, CONNECTIONS, SECONDS) for _ in range(ROUNDS)]
    rows = [row(f"/recommend, ranked anew, {CONNECTIONS} connections", closed)]
    capacity = median(report.rate() for report in closed)
    for share in (0.7, 2.0):
        opened = [await open_loop(base, requests, share * capacity, SECONDS) for _ in range(ROUNDS)]
        rows.append(row(f"/recommend, {share:g} times that rate, open loop", opened))
    return rows


def main(data_dir: Path) -> None:
    with server(data_dir) as running:
        rows = asyncio.run(cached(running.url))
    with server(data_dir, list_cache_bytes=0) as running:
        rows += asyncio.run(anew(running.url))
    publish(
        "recommend",
        ["what", "200s/s", "of doing nothing", "p50 ms", "p99 ms", "503s/s", "errors"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        seconds=SECONDS,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    run_command(main)
