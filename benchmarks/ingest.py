"""How many events a second one server takes over HTTP, in lists and one by one.

    python -m benchmarks.ingest DATA_DIR

DATA_DIR is the data folder of a service, as `make demo` leaves it in var/demo/NAME; the benchmark
works on a copy. Closed loops; the client runs beside the server, on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load import closed_loop
from benchmarks.report import publish
from benchmarks.serving import server

SECONDS = 5.0
ROUNDS = 3
CASES = ((1_000, 8), (1, 32))  # rows of a list, connections


def posts(base: str, rows: int, run: str) -> Iterator[bytes]:
    """Requests with events that nobody has posted before."""
    host = urlsplit(base).netloc
    n = 0
    while True:
        body = json.dumps(
            [
                {"event_id": f"{run}-{n}-{i}", "user": f"u{(n + i) % 997}", "item": f"i{i % 499}"}
                for i in range(rows)
            ]
        )
        head = f"POST /events HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        yield f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        n += 1


async def run(base: str) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for size, connections in CASES:
        for turn in range(ROUNDS):
            requests = posts(base, size, f"{size}-{turn}")
            report = await closed_loop(base, requests, connections, SECONDS)
            others = sum(n for status, n in report.statuses.items() if status != 200)
            rate, p50, p99 = report.rate(), report.quantile(0.5), report.quantile(0.99)
            rows.append([size, connections, rate * size, rate, p50, p99, others])
    return rows


def main(data_dir: Path) -> None:
    with server(data_dir) as running:
        rows = asyncio.run(run(running.base))
    publish(
        "ingest",
        ["rows a list", "connections", "events/s", "lists/s", "p50 ms", "p99 ms", "errors"],
        rows,
        data=data_dir.name,
        seconds=SECONDS,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
