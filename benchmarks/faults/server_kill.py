"""SIGKILL of a server while it takes events: what was acknowledged is there, once.

    python -m benchmarks.faults.server_kill [ROUNDS]

Each round several clients post lists of events; the server is killed at a random moment, the
database is looked into, the server is started again, and the clients send again whatever was not
acknowledged. Of a list that was not acknowledged all rows may be there, or none.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.faults.databases import KINDS, Place, place, upgrade
from benchmarks.report import publish
from deploy.processes import NcrServer

CLIENTS, ROWS = 6, 200
COLUMNS = [
    "database", "rounds", "acknowledged", "unacknowledged lists", "of them stored",
    "half stored", "lost", "counted twice", "rounds without an open list",
]  # fmt: skip


@dataclass
class Tally:
    """What was found over all rounds."""

    rounds: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    stored: int = 0
    half: int = 0
    lost: int = 0
    twice: int = 0
    idle: int = 0

    def row(self, kind: str) -> list[Any]:
        figures = (self.rounds, self.acknowledged, self.unacknowledged, self.stored)
        return [kind, *figures, self.half, self.lost, self.twice, self.idle]


@dataclass
class Posted:
    """The lists of one round, by their number."""

    acknowledged: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    """Sent, or about to be, and not acknowledged."""


def events(turn: int, number: int) -> list[dict[str, Any]]:
    return [
        {"event_id": f"{turn}-{number}-{i}", "user": f"u{(number + i) % 997}", "item": f"i{i}"}
        for i in range(ROWS)
    ]


async def _post_until_killed(base: str, turn: int, posted: Posted) -> None:
    numbers = iter(range(1_000_000))

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=base, timeout=10) as http:
            for number in numbers:
                posted.open.add(number)
                try:
                    answer = await http.post("/events", json=events(turn, number))
                except httpx2.TransportError:
                    return  # killed
                answer.raise_for_status()
                if answer.json()["accepted"] != ROWS:
                    raise AssertionError(answer.text)
                posted.open.remove(number)
                posted.acknowledged.add(number)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def _post_again(base: str, turn: int, numbers: set[int], stored: set[int]) -> None:
    async with httpx2.AsyncClient(base_url=base, timeout=30) as http:
        for number in sorted(numbers):
            answer = (await http.post("/events", json=events(turn, number))).json()
            expected = (0, ROWS) if number in stored else (ROWS, 0)
            if (answer["accepted"], answer["duplicates"]) != expected:
                raise AssertionError(f"{answer}, expected {expected}")


def one_round(where: Place, server: NcrServer, turn: int, tally: Tally) -> None:
    posted = Posted()

    async def run() -> None:
        posting = asyncio.create_task(_post_until_killed(server.url, turn, posted))
        await asyncio.sleep(random.uniform(0.3, 1.2))
        await asyncio.to_thread(server.kill)
        await posting

    asyncio.run(run())
    rows = _rows_of(where, turn)
    stored = {number for number in posted.open if rows.get(number) == ROWS}
    tally.rounds += 1
    tally.acknowledged += ROWS * len(posted.acknowledged)
    tally.unacknowledged += len(posted.open)
    tally.stored += len(stored)
    tally.half += sum(0 < rows.get(number, 0) < ROWS for number in posted.open)
    tally.lost += sum(ROWS - rows.get(number, 0) for number in posted.acknowledged)
    tally.idle += not posted.open
    server.start()
    asyncio.run(_post_again(server.url, turn, posted.open, stored))
    rows = _rows_of(where, turn)
    everything = posted.open | posted.acknowledged
    tally.lost += sum(max(0, ROWS - rows.get(number, 0)) for number in everything)
    tally.twice += sum(rows.values()) - ROWS * len(everything)


def _rows_of(where: Place, turn: int) -> dict[int, int]:
    """How many rows there are of each list of a round."""
    found: dict[int, int] = {}
    for (event_id,) in where.query(f"SELECT event_id FROM events WHERE event_id LIKE '{turn}-%'"):
        number = int(event_id.split("-")[1])
        found[number] = found.get(number, 0) + 1
    return found


def run(kind: str, rounds: int) -> Tally:
    """All rounds on one kind of database."""
    tally = Tally()
    with place(kind) as where:
        upgrade(where)
        with NcrServer(where.env(NCR_LOG_LEVEL="warning"), where.folder / "server.log") as server:
            for turn in range(rounds):
                one_round(where, server, turn, tally)
                print(f"{kind} {turn + 1}/{rounds}", tally, flush=True)
            # Each seq once, and as many as the counter says.
            seqs = where.query("SELECT count(*), count(DISTINCT seq), max(seq) FROM events")[0]
            counter = where.query("SELECT value FROM counters WHERE name = 'event_seq'")[0][0]
            if len({*seqs, counter}) != 1:
                raise AssertionError(f"{seqs}, counter {counter}")
            if (damage := where.damage()) is not None:
                raise AssertionError(damage)
    return tally


def main(rounds: int) -> None:
    started = time.perf_counter()
    tallies = {kind: run(kind, rounds) for kind in KINDS}
    rows = [tally.row(kind) for kind, tally in tallies.items()]
    seconds = round(time.perf_counter() - started)
    publish("faults-server-kill", COLUMNS, rows, clients=CLIENTS, rows_a_list=ROWS, seconds=seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
