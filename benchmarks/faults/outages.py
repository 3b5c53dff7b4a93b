"""Redis and PostgreSQL killed and restarted under load, behind a proxy with two servers.

    python -m benchmarks.faults.outages [ROUNDS]

Before, the right list of every user is noted. Under load, every answer is either that list, or,
while PostgreSQL is away, a 503; and both servers answer all questions again, without having been
restarted. Events are posted all the time: what was acknowledged must be there at the end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import psycopg

from benchmarks.faults.training import LEASE, SECONDS, SMALL, add_events, train
from benchmarks.report import publish
from deploy.processes import wait_until
from deploy.topology import DATABASE, Topology

CLIENTS = 8
AGAIN = 10 * CLIENTS
"""It is back after so many answers without one that fails."""
USERS = sorted({user for user, _, _ in SMALL.interactions})
COLUMNS = [
    "what", "rounds", "answers", "wrong answers", "503s", "other errors", "errors once it was back",
    "back after ms, at most", "good answers from then on", "acknowledged events",
    "of them lost",
]  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds of each part of a round."""

    calm: float = 1.5
    away: float = 2.0
    back: float = 4.0


@dataclass
class Seen:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)
    """When each answer that was not 200 came, and what it said."""
    acknowledged: set[str] = field(default_factory=set)
    good: list[float] = field(default_factory=list)
    """When each answer of 200 came."""
    taken: list[float] = field(default_factory=list)
    """When each event was acknowledged."""

    async def note(self, request: Awaitable[httpx2.Response]) -> httpx2.Response | None:
        """The answer, if it is a 200; of all others it is noted what they were."""
        try:
            answer = await request
        except httpx2.TransportError as error:
            self.statuses[-1] += 1
            self._failed(f"{type(error).__name__}: {error}")
            return None
        self.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            self.good.append(time.monotonic())
            return answer
        self._failed(answer.text)
        if answer.status_code == 503 and "Retry-After" not in answer.headers:
            self.wrong.append(f"no Retry-After: {answer.text}")
        await asyncio.sleep(0.02)
        return None

    def _failed(self, why: str) -> None:
        self.failures.append((time.monotonic(), why))

    def in_a_row(self, since: float) -> tuple[int, int]:
        """Answers of 200, and events acknowledged, without a failure until now."""
        since = max([since, *(at for at, _ in self.failures[-1:])])
        return sum(at > since for at in self.good), sum(at > since for at in self.taken)


def _wait_until_all_is_well(
    topology: Topology, seen: Seen, right: dict[str, Any], back: float
) -> int:
    """Until nothing fails any more, neither through the proxy nor at any server; ProcessError if
    that does not come. The answers that were good from then on.
    """

    def answers() -> bool:
        lists, events = seen.in_a_row(back)
        return lists >= AGAIN and events > 0

    wait_until(answers, SECONDS, "answers again")
    for server in topology.servers:
        wait_until(partial(_answers, server.url, right), SECONDS, f"the list of {server.url}")
    return seen.in_a_row(back)[0]


def _answers(base: str, right: dict[str, Any]) -> bool:
    answer = httpx2.get(f"{base}/recommend/{USERS[0]}", timeout=30)
    return answer.status_code == 200 and _ids(answer) == right[USERS[0]]


def _ids(answer: httpx2.Response) -> list[str]:
    return [item["id"] for item in answer.json()["items"]]


async def _ask(
    base: str, right: dict[str, Any], number: int, seen: Seen, stop: threading.Event
) -> None:
    async with httpx2.AsyncClient(base_url=base, timeout=20) as http:
        n = number
        while not stop.is_set():
            user = USERS[n % len(USERS)]
            # Half of them ask for what nobody has asked for: those are ranked anew.
            extra = f"?exclude=none-{n}" if n % 2 else ""
            n += 1
            answer = await seen.note(http.get(f"/recommend/{user}{extra}"))
            if answer is not None and _ids(answer) != right[user]:
                seen.wrong.append(answer.text)


async def _post(base: str, run: str, seen: Seen, stop: threading.Event) -> None:
    """Events of users of their own: nobody's list changes."""
    async with httpx2.AsyncClient(base_url=base, timeout=20) as http:
        n = 0
        while not stop.is_set():
            event = {"event_id": f"{run}-{n}", "user": f"poster-{run}", "item": "film-1"}
            if await seen.note(http.post("/events", json=event)) is not None:
                seen.acknowledged.add(event["event_id"])
                seen.taken.append(time.monotonic())
                n += 1


def one_round(
    topology: Topology, what: str, turn: int, right: dict[str, Any], pace: Pace
) -> list[Any]:
    process = topology.redis if what.startswith("redis") else topology.postgres
    assert process is not None
    seen, stop = Seen(), threading.Event()

    async def load() -> None:
        asking = [_ask(topology.url, right, 1000 * c, seen, stop) for c in range(CLIENTS)]
        await asyncio.gather(*asking, _post(topology.url, f"{what}-{turn}", seen, stop))

    # In a thread of its own: a process ends with the thread that started it.
    clients = threading.Thread(target=lambda: asyncio.run(load()))
    clients.start()
    time.sleep(pace.calm)
    if what.endswith("paused"):
        process.pause()
        time.sleep(pace.away)
        process.resume()
    elif what.endswith("flushed"):
        import redis

        assert topology.redis is not None
        with redis.Redis.from_url(topology.redis.url) as client:
            for _ in range(20):
                client.flushall()
                time.sleep(pace.away / 20)
    else:
        process.kill()
        time.sleep(pace.away)
        process.start()
    back = time.monotonic()
    time.sleep(pace.back)
    try:
        in_a_row = _wait_until_all_is_well(topology, seen, right, back)
    finally:
        stop.set()
        clients.join()
    late = [at - back for at, _ in seen.failures if at > back]
    others = sum(n for status, n in seen.statuses.items() if status not in (200, 503))
    with psycopg.connect(topology.postgres.url_of(DATABASE)) as connection:
        rows = connection.execute(
            "SELECT event_id FROM events WHERE event_id LIKE %s", (f"{what}-{turn}-%",)
        )
        stored = {row[0] for row in rows}
    print(what, turn, dict(seen.statuses), seen.wrong[:1], seen.failures[:1], flush=True)
    return [
        sum(seen.statuses.values()), len(seen.wrong), seen.statuses[503], others, len(late),
        1e3 * max(late, default=0.0), in_a_row, len(seen.acknowledged),
        len(seen.acknowledged - stored),
    ]  # fmt: skip


def run(topology: Topology, what: list[str], rounds: int, pace: Pace) -> list[list[Any]]:
    """A row for each kind of outage; all servers serve the same model of the small data."""
    rows: list[list[Any]] = []
    with httpx2.Client(base_url=topology.url, timeout=30) as client:
        right = {user: _ids(client.get(f"/recommend/{user}")) for user in USERS}
    for kind in what:
        each = [one_round(topology, kind, turn, right, pace) for turn in range(rounds)]
        sums = [sum(column) for column in zip(*each, strict=True)]
        sums[5], sums[6] = max(row[5] for row in each), min(row[6] for row in each)
        rows.append([kind, rounds, *sums])
    if not all(process.running for process in topology.processes.values()):
        raise AssertionError("a process has ended")
    return rows


KINDS = ["redis killed", "redis paused", "redis flushed", "postgres killed"]


def main(rounds: int) -> None:
    pace = Pace()
    with Topology(env=LEASE) as topology:
        add_events(topology.url)
        with httpx2.Client(base_url=topology.url, timeout=30) as client:
            train(client, *(server.url for server in topology.servers))
        rows = run(topology, KINDS, rounds, pace)
    publish("faults-outages", COLUMNS, rows, clients=CLIENTS + 1, away_seconds=pace.away)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
