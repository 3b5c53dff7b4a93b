"""SIGKILL of a server while it takes events: what was acknowledged is there, once.

Each round several clients post lists of events; the server is killed at a random moment, the
database is read, the server is started again, and the clients send again whatever was not
acknowledged. Of a list that was not acknowledged all rows may be there, or none.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.faults.setup import Storage, publish_sums, storage
from tests.cluster.servers import NcrServer

CLIENTS, ROWS = 6, 200
COLUMNS = [
    "rounds", "acknowledged", "unacknowledged lists", "of them stored", "half stored", "lost",
    "counted twice", "rounds without an open list",
]  # fmt: skip


@dataclass
class PostedLists:
    """The lists of one round, by their number; open ones are sent and not acknowledged."""

    acknowledged: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)


def events(turn: int, number: int) -> list[dict[str, Any]]:
    return [
        {"event_id": f"{turn}-{number}-{i}", "user": f"u{(number + i) % 997}", "item": f"i{i}"}
        for i in range(ROWS)
    ]


async def _post_until_killed(url: str, turn: int, posted: PostedLists) -> None:
    numbers = iter(range(1_000_000))

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=10) as http:
            for number in numbers:
                posted.open.add(number)
                try:
                    response = await http.post("/events", json=events(turn, number))
                except httpx2.TransportError:
                    return  # killed
                if response.raise_for_status().json()["accepted"] != ROWS:
                    raise AssertionError(response.text)
                posted.open.remove(number)
                posted.acknowledged.add(number)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def one_round(storage: Storage, server: NcrServer, turn: int) -> Counter[str]:
    """The figures of a round, by the names of the columns."""
    posted = PostedLists()

    async def post_and_kill() -> None:
        posting = asyncio.create_task(_post_until_killed(server.url, turn, posted))
        await asyncio.sleep(random.uniform(0.3, 1.2))
        await asyncio.to_thread(server.kill)
        await posting

    asyncio.run(post_and_kill())
    rows = _rows_by_list(storage, turn)
    stored = {number for number in posted.open if rows[number] == ROWS}
    half = sum(0 < rows[number] < ROWS for number in posted.open)
    lost = sum(ROWS - rows[number] for number in posted.acknowledged)
    server.start()
    for number in sorted(posted.open):
        answer = httpx2.post(f"{server.url}/events", json=events(turn, number), timeout=30).json()
        expected = (0, ROWS) if number in stored else (ROWS, 0)
        if (answer["accepted"], answer["duplicates"]) != expected:
            raise AssertionError(f"{answer}, expected {expected}")
    rows = _rows_by_list(storage, turn)
    everything = posted.open | posted.acknowledged
    lost += sum(max(0, ROWS - rows[number]) for number in everything)
    twice = rows.total() - ROWS * len(everything)
    figures = (
        1, ROWS * len(posted.acknowledged), len(posted.open), len(stored), half, lost, twice,
        int(not posted.open),
    )  # fmt: skip
    return Counter(dict(zip(COLUMNS, figures, strict=True)))


def _rows_by_list(storage: Storage, turn: int) -> Counter[int]:
    rows = storage.query(f"SELECT event_id FROM events WHERE event_id LIKE '{turn}-%'")
    return Counter(int(event_id.split("-")[1]) for (event_id,) in rows)


def run(database: str, rounds: int) -> Counter[str]:
    """Sums over all rounds on one kind of database."""
    figures: Counter[str] = Counter()
    with (
        storage(database) as place,
        NcrServer(place.env(NCR_LOG_LEVEL="warning"), place.folder / "server.log") as server,
    ):
        for turn in range(rounds):
            figures.update(one_round(place, server, turn))
            print(f"{database} {turn + 1}/{rounds}", figures, flush=True)
        # Each seq once, and as many as the counter says.
        seqs = place.query("SELECT count(*), count(DISTINCT seq), max(seq) FROM events")[0]
        counter = place.query("SELECT value FROM counters WHERE name = 'event_seq'")[0][0]
        if len({*seqs, counter}) != 1:
            raise AssertionError(f"{seqs}, counter {counter}")
        if (damage := place.damage()) != "none":
            raise AssertionError(damage)
    return figures


def main(rounds: int = 100) -> None:
    publish_sums("faults-server-kill", COLUMNS, run, rounds, clients=CLIENTS, rows_a_list=ROWS)
