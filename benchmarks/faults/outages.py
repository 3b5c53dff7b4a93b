"""Two servers behind a proxy: Redis and PostgreSQL killed and restarted under load, and how soon an
event that one server took is in the lists of the other.

Outages: before, the right list of every user is noted. Under load, every answer is either that
list, or, while PostgreSQL is away, a 503; and both servers answer all questions again, without
having been restarted. Events are posted all the time: what was acknowledged must be there at the
end.

Visibility, with and without Redis: by ``min_seq`` the very next answer must have the event; without
it the other server is polled. Milliseconds from the acknowledgement to the end of the first answer
that has it.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import psycopg
import redis

from benchmarks.faults.setup import LEASE, SMALL, WAIT_SECONDS, add_events, train
from benchmarks.harness import publish
from tests.cluster.process import wait_until
from tests.cluster.topology import DATABASE, Topology

CLIENTS = 8
MIN_GOOD_ANSWERS = 10 * CLIENTS  # without one that fails: then the outage is over
USERS = sorted({user for user, _, _ in SMALL.interactions})
OUTAGES = ["redis killed", "redis paused", "redis flushed", "postgres killed"]
COLUMNS = [
    "what", "rounds", "answers", "wrong answers", "503s", "other errors", "errors once it was back",
    "back after ms, at most", "good answers from then on", "acknowledged events",
    "of them lost",
]  # fmt: skip
VISIBILITY_COLUMNS = [
    "Redis", "events", "missing with min_seq", "with min_seq p50 ms", "max ms", "without p50 ms",
    "p99 ms", "max ms ",
]  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds of each part of a round."""

    calm: float = 1.5
    away: float = 2.0
    back: float = 4.0


@dataclass
class Observations:
    """Answers that the clients got, with the times at which they came."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)
    good: list[float] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)
    """Events by their ids."""

    async def record(self, request: Awaitable[httpx2.Response]) -> httpx2.Response | None:
        """The response, if it is a 200; all others are only counted."""
        try:
            response = await request
        except httpx2.TransportError as error:
            self.statuses[-1] += 1
            self.failures.append((time.monotonic(), f"{type(error).__name__}: {error}"))
            return None
        self.statuses[response.status_code] += 1
        if response.status_code == 200:
            self.good.append(time.monotonic())
            return response
        self.failures.append((time.monotonic(), response.text))
        if response.status_code == 503 and "Retry-After" not in response.headers:
            self.wrong.append(f"no Retry-After: {response.text}")
        await asyncio.sleep(0.02)
        return None

    def good_since(self, since: float) -> tuple[int, int]:
        """Answers of 200, and events acknowledged, without a failure until now."""
        since = max([since, *(moment for moment, _ in self.failures[-1:])])
        times = self.good, self.acknowledged.values()
        lists, events = (sum(moment > since for moment in each) for each in times)
        return lists, events


def _ids(response: httpx2.Response) -> list[str]:
    return [item["id"] for item in response.json()["items"]]


def _is_right(url: str, right: dict[str, Any]) -> bool:
    response = httpx2.get(f"{url}/recommend/{USERS[0]}", timeout=30)
    return response.status_code == 200 and _ids(response) == right[USERS[0]]


async def _request_lists(
    url: str, right: dict[str, Any], number: int, seen: Observations, stop: threading.Event
) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=20) as http:
        n = number
        while not stop.is_set():
            user = USERS[n % len(USERS)]
            # Half of the requests are like no other one before: those lists are ranked anew.
            extra = f"?exclude=none-{n}" if n % 2 else ""
            n += 1
            response = await seen.record(http.get(f"/recommend/{user}{extra}"))
            if response is not None and _ids(response) != right[user]:
                seen.wrong.append(response.text)


async def _post(url: str, run: str, seen: Observations, stop: threading.Event) -> None:
    """Events of users of their own: nobody's list changes."""
    async with httpx2.AsyncClient(base_url=url, timeout=20) as http:
        n = 0
        while not stop.is_set():
            event = {"event_id": f"{run}-{n}", "user": f"poster-{run}", "item": "film-1"}
            if await seen.record(http.post("/events", json=event)) is not None:
                seen.acknowledged[event["event_id"]] = time.monotonic()
                n += 1


def _interrupt(topology: Topology, outage: str, seconds: float, seen: Observations) -> None:
    """Take a process away for so long; PostgreSQL until a request was refused, too."""
    process = topology.redis if outage.startswith("redis") else topology.postgres
    assert process is not None
    if outage.endswith("paused"):
        process.pause()
        time.sleep(seconds)
        process.resume()
    elif outage.endswith("flushed"):
        assert topology.redis is not None
        with redis.Redis.from_url(topology.redis.url) as client:
            for _ in range(20):
                client.flushall()
                time.sleep(seconds / 20)
    else:
        process.kill()
        try:
            time.sleep(seconds)
            if outage.startswith("postgres"):  # a slow machine may have sent nothing yet
                wait_until(lambda: seen.statuses[503] > 0, WAIT_SECONDS, "a 503")
        finally:
            process.start()


def one_round(
    topology: Topology, outage: str, turn: int, right: dict[str, Any], pace: Pace
) -> list[Any]:
    """The figures of one outage; ProcessError if the service does not recover."""
    seen, stop = Observations(), threading.Event()

    async def load() -> None:
        clients = [
            _request_lists(topology.url, right, 1000 * c, seen, stop) for c in range(CLIENTS)
        ]
        await asyncio.gather(*clients, _post(topology.url, f"{outage}-{turn}", seen, stop))

    # In a thread of its own: a process ends with the thread that started it.
    clients = threading.Thread(target=lambda: asyncio.run(load()))
    clients.start()
    time.sleep(pace.calm)
    _interrupt(topology, outage, pace.away, seen)
    back = time.monotonic()
    time.sleep(pace.back)

    def recovered() -> bool:
        lists, events = seen.good_since(back)
        return lists >= MIN_GOOD_ANSWERS and events > 0

    try:
        wait_until(recovered, WAIT_SECONDS, "answers again")
        for server in topology.servers:
            wait_until(
                partial(_is_right, server.url, right), WAIT_SECONDS, f"lists of {server.url}"
            )
        good = seen.good_since(back)[0]
    finally:
        stop.set()
        clients.join()
    late = [moment - back for moment, _ in seen.failures if moment > back]
    others = sum(n for status, n in seen.statuses.items() if status not in (200, 503))
    with psycopg.connect(topology.postgres.url_of(DATABASE)) as connection:
        query = "SELECT event_id FROM events WHERE event_id LIKE %s"
        stored = {row[0] for row in connection.execute(query, (f"{outage}-{turn}-%",))}
    print(outage, turn, dict(seen.statuses), seen.wrong[:1], seen.failures[:1], flush=True)
    return [
        sum(seen.statuses.values()), len(seen.wrong), seen.statuses[503], others, len(late),
        1e3 * max(late, default=0.0), good, len(seen.acknowledged),
        len(seen.acknowledged.keys() - stored),
    ]  # fmt: skip


def run(topology: Topology, rounds: int, pace: Pace) -> list[list[Any]]:
    """A row for each kind of outage; all servers serve the same model of the small data."""
    rows: list[list[Any]] = []
    with httpx2.Client(base_url=topology.url, timeout=30) as client:
        right = {user: _ids(client.get(f"/recommend/{user}")) for user in USERS}
    for outage in OUTAGES:
        each = [one_round(topology, outage, turn, right, pace) for turn in range(rounds)]
        sums = [sum(column) for column in zip(*each, strict=True)]
        sums[5], sums[6] = max(row[5] for row in each), min(row[6] for row in each)
        rows.append([outage, rounds, *sums])
    if not all(process.running for process in topology.processes.values()):
        raise AssertionError("a process has ended")
    return rows


def visibility(topology: Topology, events: int) -> list[Any]:
    """A row of the table; both servers serve the same model of the small data."""
    strict: list[float] = []
    polled: list[float] = []
    missing = 0
    one, two = (httpx2.Client(base_url=s.url, timeout=30) for s in topology.servers)

    def recommend(user: str, **params: Any) -> httpx2.Response:
        return two.get(f"/recommend/{user}", params=params).raise_for_status()

    with one, two:
        for n in range(events):
            user = USERS[n % len(USERS)]
            item = _ids(recommend(user))[0]
            seq = one.post("/events", json={"user": user, "item": item}).json()["last_seq"]
            began = time.perf_counter()
            if n % 2:
                response = recommend(user, min_seq=seq)
                strict.append(1e3 * (time.perf_counter() - began))
                missing += item in _ids(response) or response.json()["as_of_seq"] < seq
            else:
                while item in _ids(recommend(user)):
                    pass
                polled.append(1e3 * (time.perf_counter() - began))
    polled.sort()
    return [
        "with" if topology.redis is not None else "without", events, missing,
        statistics.median(strict), max(strict), statistics.median(polled),
        polled[int(0.99 * len(polled))], polled[-1],
    ]  # fmt: skip


@contextmanager
def trained_topology(**options: Any) -> Iterator[Topology]:
    """The whole topology; all servers serve a model of the small data."""
    with Topology(env=LEASE, **options) as topology:
        add_events(topology.url)
        with httpx2.Client(base_url=topology.url, timeout=30) as client:
            train(client, *(server.url for server in topology.servers))
        yield topology


def main(rounds: int = 10) -> None:
    pace = Pace()
    with trained_topology() as topology:
        rows = run(topology, rounds, pace)
    publish("faults-outages", COLUMNS, rows, clients=CLIENTS + 1, away_seconds=pace.away)


def measure_visibility(events: int = 400) -> None:
    rows = []
    for with_redis in (True, False):
        with trained_topology(redis=with_redis, workers=1) as topology:
            rows.append(visibility(topology, events))
    publish("faults-visibility", VISIBILITY_COLUMNS, rows)
