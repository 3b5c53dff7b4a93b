"""How soon an event that one server took is in another one's answer, with and without Redis.

    python -m benchmarks.faults.visibility [EVENTS]

By ``min_seq`` the very next answer must have it; without, the other server is asked again and
again.
Milliseconds from the acknowledgement to the end of the first answer that has it.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import httpx2

from benchmarks.faults.training import LEASE, SMALL, add_events, train
from benchmarks.report import publish
from deploy.topology import Topology

COLUMNS = [
    "Redis", "events", "missing with min_seq", "with min_seq p50 ms", "max ms", "without p50 ms",
    "p99 ms", "max ms ",
]  # fmt: skip


def run(topology: Topology, events: int) -> list[Any]:
    """A row of the table; both servers serve the same model of the small data."""
    users = sorted({user for user, _, _ in SMALL.interactions})
    strict: list[float] = []
    loose: list[float] = []
    missing = 0
    one, two = (httpx2.Client(base_url=s.url, timeout=30) for s in topology.servers)
    with one, two:
        for n in range(events):
            user = users[n % len(users)]
            taken = _ask(two, user)["items"][0]["id"]
            answer = one.post("/events", json={"user": user, "item": taken}).json()
            began = time.perf_counter()
            if n % 2:
                found = _ask(two, user, min_seq=answer["last_seq"])
                strict.append(1e3 * (time.perf_counter() - began))
                missing += _has(found, taken) or found["as_of_seq"] < answer["last_seq"]
            else:
                while _has(_ask(two, user), taken):
                    pass
                loose.append(1e3 * (time.perf_counter() - began))
    loose.sort()
    return [
        "with" if topology.redis is not None else "without", events, missing,
        statistics.median(strict), max(strict), statistics.median(loose),
        loose[int(0.99 * len(loose))], loose[-1],
    ]  # fmt: skip


def _ask(client: httpx2.Client, user: str, **params: Any) -> dict[str, Any]:
    response = client.get(f"/recommend/{user}", params=params)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def _has(answer: dict[str, Any], item: str) -> bool:
    return any(found["id"] == item for found in answer["items"])


def _with_topology(events: int, *, redis: bool) -> list[Any]:
    with Topology(env=LEASE, redis=redis, workers=1) as topology:
        add_events(topology.url)
        with httpx2.Client(base_url=topology.url, timeout=30) as client:
            train(client, *(server.url for server in topology.servers))
        return run(topology, events)


def main(events: int) -> None:
    rows = [_with_topology(events, redis=redis) for redis in (True, False)]
    publish("faults-visibility", COLUMNS, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
