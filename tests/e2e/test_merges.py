"""Merges of users while a server is killed: all that visitors did is their user's, once."""

from __future__ import annotations

import asyncio
import random

import httpx2
import pytest

from benchmarks.faults.setup import Storage, storage
from tests.cluster.servers import NcrServer
from tests.cluster.topology import missing_programs
from tests.conftest import skip_or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VISITORS, EVENTS, USERS, ROUNDS = 60, 60, 7, 2
OWNERS = """SELECT e.event_id, u.external_id FROM events e JOIN users u ON u.id = e.user_id"""


def events(visitor: int) -> list[dict[str, str]]:
    return [
        {"event_id": f"{visitor}-{n}", "user": f"v{visitor}", "item": f"i{n % 20}"}
        for n in range(EVENTS)
    ]


async def work_until_killed(url: str, todo: list[int], merged: set[int]) -> None:
    """Merge visitors, and post what they did once more, until nobody answers."""

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
            while todo:
                visitor = todo.pop()
                into = {"into": f"u{visitor % USERS}"}
                try:
                    merge = http.post(f"/users/v{visitor}/merge", json=into)
                    again = http.post("/events", json=events(visitor))
                    answer, posted = await asyncio.gather(merge, again)
                except httpx2.TransportError:
                    todo.append(visitor)
                    return
                assert answer.status_code == posted.status_code == 200, answer.text
                assert posted.json()["duplicates"] == EVENTS
                assert answer.json()["events"] == EVENTS
                merged.add(visitor)

    await asyncio.gather(*(client() for _ in range(6)))


def check(place: Storage, merged: set[int]) -> int:
    """Each visitor's events are all there, once, and of one user; returns how many have moved."""
    rows = place.query(OWNERS)
    assert len(rows) == len({event_id for event_id, _ in rows}) == VISITORS * EVENTS
    owners: dict[int, set[str]] = {}
    for event_id, owner in rows:
        owners.setdefault(int(event_id.split("-")[0]), set()).add(owner)
    moved = 0
    for visitor, names in owners.items():
        target = f"u{visitor % USERS}"
        assert names in ({target}, {f"v{visitor}"}), visitor
        assert names == {target} or visitor not in merged, visitor
        moved += names == {target}
    assert place.query("SELECT count(*) FROM user_aliases") == [(moved,)]
    seqs = place.query("SELECT count(DISTINCT seq), max(seq) FROM events")[0]
    counter = place.query("SELECT value FROM counters WHERE name = 'event_seq'")[0][0]
    assert seqs[0] == VISITORS * EVENTS
    # Every seq belongs to what is there, or to what has moved away and left a gap behind it.
    assert counter == VISITORS * EVENTS + moved * (EVENTS + 1)
    return moved


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
def test_a_merge_is_done_once_when_the_server_is_killed(database: str) -> None:
    if database == "postgresql" and (missing := missing_programs()):
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    with (
        storage(database) as place,
        NcrServer(place.env(NCR_LOG_LEVEL="warning"), place.folder / "server.log") as server,
    ):
        users = [{"id": f"u{n}"} for n in range(USERS)]
        httpx2.post(f"{server.url}/users", json=users).raise_for_status()
        for visitor in range(VISITORS):
            answer = httpx2.post(f"{server.url}/events", json=events(visitor), timeout=30)
            assert answer.json()["accepted"] == EVENTS
        todo, merged = list(range(VISITORS)), set[int]()

        async def work_and_kill() -> None:
            working = asyncio.create_task(work_until_killed(server.url, todo, merged))
            started = len(merged)
            while len(merged) < started + 5 and todo:  # noqa: ASYNC110 - it is another process's work
                await asyncio.sleep(0.005)
            await asyncio.sleep(random.uniform(0, 0.1))
            await asyncio.to_thread(server.kill)
            await working

        for _ in range(ROUNDS):
            asyncio.run(work_and_kill())
            assert todo, "the kill came after all was done"
            done = check(place, merged)
            assert done >= len(merged)
            server.start()
        asyncio.run(work_until_killed(server.url, todo, merged))
        assert check(place, merged) == len(merged) == VISITORS
        # Sent again, all of them, they change nothing.
        todo = list(range(VISITORS))
        asyncio.run(work_until_killed(server.url, todo, merged))
        assert check(place, merged) == VISITORS
