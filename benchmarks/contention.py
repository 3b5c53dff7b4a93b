"""What a bad neighbour costs plain lists: their latency without and with each, in turns.

    python -m benchmarks.contention DATA_DIR [SECONDS [ROUNDS [NEIGHBOUR ...]]]
    python -m benchmarks.contention upkeep DATA_DIR [SECONDS [ROUNDS]]

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on a copy. No list is kept, so every plain list is ranked. A neighbour is a
process of its own beside the client and the server, on the same cores: read its ratio beside those
of `a busy core`, which asks the server for nothing, and of `lists of others`, which are as many
plain lists as other neighbours have requests. With names of neighbours only they are measured, and
no result is kept.

The second form is about upkeep: lists are kept, 64 connections ask for those of known users or of
newcomers, while popularity is counted anew again and again, or ten PATCHes a second change an
attribute of an item. `python -m benchmarks.size data DATA_DIR 20000000x200000` makes such a folder.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx2
import orjson

from benchmarks.harness import publish, run_command
from benchmarks.load import Report, Server, closed_loop, requests_for, server
from benchmarks.recommend import users_with_lists

CONNECTIONS = 8  # of plain lists
UPKEEP_CONNECTIONS = 64
NEIGHBOURS = 16  # connections of a neighbour, unless it says otherwise
SOCKETS, PIPELINED = 70, 60  # a little more than NCR_MAX_CONCURRENCY
ITEMS = 1_000
EXCLUDED = 60
USERS = 256  # of plain lists; few enough that those of a trial are all ranked once before
BODY_BYTES = 8_000_000
FOREVER = 1e6  # seconds: the parent process ends a neighbour

ALONE = "alone"
TRIAL = "a trial with share 1"


def post(base: str, path: str, body: bytes) -> bytes:
    """A POST request as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(base).netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def best_items(base: str, user: str, n: int) -> list[str]:
    """The ids of a user's list, best first."""
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        path = f"/recommend/{user}?n={n}&exclude_seen=false"
        answer = (await client.get(path)).json()
    return [item["id"] for item in answer["items"]]


async def repeat(base: str, requests: list[bytes], connections: int = NEIGHBOURS) -> None:
    """Sends the requests over and over."""
    print("ready", flush=True)
    while True:  # connections that the server has closed are opened again
        await closed_loop(base, cycle(requests), connections, FOREVER)


async def busy_core(base: str, user: str) -> None:
    """No request at all: a process that computes."""
    print("ready", flush=True)
    while True:
        pass


async def others(base: str, user: str) -> None:
    """Plain lists, as the client asks for them, of whom it does not ask for."""
    users = (await users_with_lists(base))[USERS : 2 * USERS]
    await repeat(base, requests_for(base, [f"/recommend/{user}" for user in users]))


async def noop(base: str, user: str) -> None:
    """Answers that take the server nearly nothing."""
    await repeat(base, requests_for(base, ["/noop?bytes=100"]))


async def noop_64(base: str, user: str) -> None:
    """The same over 64 connections, which a server answers in turn with those of plain lists."""
    await repeat(base, requests_for(base, ["/noop?bytes=100"]), 64)


async def rerank(base: str, user: str) -> None:
    """1,000 items best first, which is the worst order for Algorithm 1."""
    body = {"user": user, "items": await best_items(base, user, ITEMS)}
    await repeat(base, [post(base, "/rerank", orjson.dumps(body))])


async def unread(base: str, user: str) -> None:
    """Pipelined requests for long lists, of whose answers nothing is read."""
    parts = urlsplit(base)
    asked = [f"/recommend/nobody-{n}?n={ITEMS}" for n in range(PIPELINED)]
    held = []
    for _ in range(SOCKETS):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((str(parts.hostname), int(parts.port or 80)))
        connection.sendall(b"".join(requests_for(base, asked)))
        held.append(connection)
    answered = -1.0
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        while (now := lists_answered((await client.get("/metrics")).text)) > answered:
            answered = now  # the first answers fill the buffers
            await asyncio.sleep(1.0)
    print("ready", flush=True)
    await asyncio.sleep(FOREVER)


def lists_answered(metrics: str) -> float:
    """How many requests for lists the server has answered."""
    found = re.search(r'ncr_http_request_seconds_count\{route="/recommend/.user."\} (\S+)', metrics)
    return float(found[1]) if found else 0.0


async def numbers(base: str, user: str) -> None:
    """Bodies of 8 MB that take a parser the longest."""
    body = b"[" + b"1," * (BODY_BYTES // 2 - 4) + b"NaN]"
    await repeat(base, [post(base, "/events", body)], 4)


async def rows(base: str, user: str) -> None:
    """Bodies of 8 MB with 10,000 rows, each of which is rejected."""
    row = {"user": user, "item": "x" * (BODY_BYTES // 10_000 - 40)}
    await repeat(base, [post(base, "/events", orjson.dumps([row] * 10_000))], 4)


async def readiness(base: str, user: str) -> None:
    """`/health/ready` over 64 connections."""
    await repeat(base, requests_for(base, ["/health/ready"]), 64)


async def exclusions(base: str, user: str) -> None:
    """Lists of 10 without the user's own best 60, as a seventh page is asked for."""
    left_out = "&".join(f"exclude={item}" for item in await best_items(base, user, EXCLUDED))
    await repeat(base, requests_for(base, [f"/recommend/{user}?{left_out}"]))


async def recounts(base: str, user: str) -> None:
    """Popularity is counted anew, one time after the other."""
    await repeat(base, requests_for(base, ["/recount"]), 1)


async def patches(base: str, user: str) -> None:
    """An attribute of an item changes ten times a second."""
    item = (await best_items(base, user, 1))[0]
    print("ready", flush=True)
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        for n in count():
            await client.patch(f"/items/{item}", json={"attributes": {"stock": n}})
            await asyncio.sleep(0.1)


NEIGHBOUR: dict[str, Callable[[str, str], Any]] = {
    "a busy core": busy_core,
    "lists of others": others,
    "/noop": noop,
    "/noop over 64 connections": noop_64,
    "/rerank, 1,000 items best first": rerank,
    "pipelined and unread": unread,
    "bodies of 8 MB, numbers": numbers,
    "bodies of 8 MB, rows": rows,
    "/health/ready": readiness,
    f"{EXCLUDED} exclusions": exclusions,
}
UPKEEP: dict[str, Callable[[str, str], Any]] = {
    "a recount": recounts,
    "10 PATCHes a second": patches,
}


def neighbour(name: str, base: str, user: str) -> None:
    """One neighbour, in a process of its own."""
    asyncio.run((NEIGHBOUR | UPKEEP)[name](base, user))


@contextmanager
def beside(name: str, running: Server, users: list[str]) -> Iterator[None]:
    """The neighbour is at work within the context."""
    user = users[0]
    if name == ALONE:
        yield
        return
    if name == TRIAL:
        body = {"kind": "interleaving", "version": second_version(running), "share": 1.0}
        trials = f"{running.url}/admin/trials"
        trial_id = httpx2.post(trials, json=body).raise_for_status().json()["trial_id"]
        wait_for_trial(running, user, trial_id)
        asyncio.run(ask_once(running.url, users))  # candidates of the second version are kept
        yield
        httpx2.post(f"{trials}/{trial_id}/stop").raise_for_status()
        return
    command = [sys.executable, "-m", "benchmarks.contention", "neighbour", name, running.url, user]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            sys.exit(f"the neighbour did not start: {name}")
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1.0)  # what it has left in the server's queues


def second_version(running: Server) -> str:
    """A published version beside the active one: a copy of its checkpoint under another name."""
    with sqlite3.connect(running.data_dir / "ncr.db", timeout=30) as database:
        active = database.execute("SELECT version FROM activation").fetchone()[0]
        second = f"{active[:-4]}{'0000' if active[-4:] != '0000' else '0001'}"
        models = running.data_dir / "models"
        shutil.copytree(models / active, models / second, dirs_exist_ok=True)
        names = [row[1] for row in database.execute("PRAGMA table_info(models)")]
        values = ["replace(path, :active, :second)" if n == "path" else n for n in names]
        values = [":second" if n == "version" else n for n in values]
        database.execute(
            f"INSERT OR IGNORE INTO models ({', '.join(names)}) "
            f"SELECT {', '.join(values)} FROM models WHERE version = :active",
            {"active": active, "second": second},
        )
    return second


def wait_for_trial(running: Server, user: str, trial_id: str) -> None:
    """Returns when the other version is loaded."""
    for _ in range(600):
        answer = httpx2.get(f"{running.url}/recommend/{user}").json()
        if answer["recommendation_id"].startswith(trial_id):
            return
        time.sleep(0.1)
    sys.exit("the trial's second version was not loaded")


async def plain(
    base: str, users: list[str], seconds: float, connections: int = CONNECTIONS
) -> Report:
    """Lists of 10, one user after the other."""
    requests = cycle(requests_for(base, [f"/recommend/{user}" for user in users]))
    return await closed_loop(base, requests, connections, seconds)


async def ask_once(base: str, users: list[str]) -> None:
    """One list of each user."""
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        for user in users:
            (await client.get(f"/recommend/{user}")).raise_for_status()


def row_of(name: str, reports: list[Report], alone: list[Report]) -> list[Any]:
    """Medians over the rounds, and how many times those without a neighbour they are."""
    p50, p99 = (median(report.quantile(q) for report in reports) for q in (0.5, 0.99))
    beside_nobody = [median(report.quantile(q) for report in alone) for q in (0.5, 0.99)]
    others = sum(n for r in reports for status, n in r.statuses.items() if status not in (200, 503))
    return [
        name,
        p50,
        p99,
        p50 / beside_nobody[0],
        p99 / beside_nobody[1],
        median(report.rate() for report in reports),
        median(report.rate(503) for report in reports),
        others,
    ]


def upkeep(data_dir: Path, seconds: float = 20.0, rounds: int = 3) -> None:
    reports: dict[tuple[str, str], list[Report]] = {}
    generator = random.Random(0)
    with server(data_dir) as running:
        known = asyncio.run(users_with_lists(running.url))
        groups = {"known users": known, "newcomers": [f"nobody-{n}" for n in range(len(known))]}
        for users in groups.values():  # lists are kept from here on
            asyncio.run(plain(running.url, users, seconds, UPKEEP_CONNECTIONS))
        for _ in range(rounds):
            turns = [(group, name) for group in groups for name in (ALONE, *UPKEEP)]
            generator.shuffle(turns)
            for group, name in turns:
                with beside(name, running, known):
                    report = asyncio.run(
                        plain(running.url, groups[group], seconds, UPKEEP_CONNECTIONS)
                    )
                    reports.setdefault((group, name), []).append(report)
    rows = [
        [group, *row_of(name, its_reports, reports[group, ALONE])]
        for (group, name), its_reports in sorted(reports.items())
    ]
    publish(
        f"upkeep-{data_dir.name.lower()}",
        [
            "lists of", "beside", "p50 ms", "p99 ms", "p50 ratio", "p99 ratio",
            "200s/s", "503s/s", "errors",
        ],
        rows,
        data=data_dir.name,
        connections=UPKEEP_CONNECTIONS,
        seconds=seconds,
        rounds=rounds,
    )  # fmt: skip


def main(
    data_dir: Path, seconds: float = 5.0, rounds: int = 3, names: tuple[str, ...] = ()
) -> None:
    measured = (ALONE, *(names or (*NEIGHBOUR, TRIAL)))
    reports: dict[str, list[Report]] = {name: [] for name in measured}
    turns, generator = list(reports), random.Random(0)
    with server(data_dir, list_cache_bytes=0) as running:
        users = asyncio.run(users_with_lists(running.url))[:USERS]
        for _ in range(rounds):
            generator.shuffle(turns)
            for name in turns:
                with beside(name, running, users):
                    reports[name].append(asyncio.run(plain(running.url, users, seconds)))
    publish(
        "" if names else f"contention-{data_dir.name.lower()}",
        ["beside", "p50 ms", "p99 ms", "p50 ratio", "p99 ratio", "200s/s", "503s/s", "errors"],
        [row_of(name, its_reports, reports[ALONE]) for name, its_reports in reports.items()],
        data=data_dir.name,
        connections=CONNECTIONS,
        seconds=seconds,
        rounds=rounds,
    )


if __name__ == "__main__":
    run_command(main, upkeep=upkeep, neighbour=neighbour)
