"""Bounded caches, and one computation a key at a time."""

from __future__ import annotations

import asyncio

import pytest

from app.core.cache import ENTRY_BYTES, ByteCache, SingleFlight
from tests.app.conftest import until

pytestmark = pytest.mark.anyio


def test_the_cache_evicts_the_least_recently_used_beyond_its_bytes() -> None:
    cache: ByteCache[str, str] = ByteCache(3 * (ENTRY_BYTES + 10))
    for key in "abc":
        cache.put(key, key.upper(), 10)
    assert cache.get("a") == "A"
    cache.put("d", "D", 10)
    assert [cache.has(key) for key in "abcd"] == [True, False, True, True]
    assert (cache.get("b"), cache.hits, cache.misses) == (None, 1, 1)
    assert dict(cache.items()) == {"a": "A", "c": "C", "d": "D"}
    cache.put("e", "E", 10)
    assert not cache.has("c")  # to look at all of them is no use of any
    cache.put("large", "L", 3 * (ENTRY_BYTES + 10))
    assert not cache.has("large")
    cache.put("a", "again", 10)
    assert (len(cache), cache.size) == (3, 3 * (ENTRY_BYTES + 10))
    cache.put("wide", "W", ENTRY_BYTES + 20)  # in the place of two
    assert len(cache) == 2
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)


def test_a_cache_of_0_bytes_stores_nothing() -> None:
    cache: ByteCache[str, str] = ByteCache(0)
    cache.put("a", "A", 0)
    assert cache.get("a") is None


async def test_single_flight_shares_a_computation() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    calls, go = 0, asyncio.Event()

    async def make() -> int:
        nonlocal calls
        calls += 1
        await go.wait()
        return calls

    asking = [asyncio.create_task(flights.run("a", make)) for _ in range(5)]
    await asyncio.sleep(0)
    other = asyncio.create_task(flights.run("b", make))
    await asyncio.sleep(0)
    asking[0].cancel()
    go.set()
    assert await asyncio.gather(*asking[1:]) == [2] * 4
    assert (await other, calls) == (2, 2)
    assert await flights.run("a", make) == 3  # nothing is remembered


async def test_single_flight_shares_an_exception() -> None:
    flights: SingleFlight[str, int] = SingleFlight()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    found = await asyncio.gather(
        *(flights.run("a", fail) for _ in range(3)), return_exceptions=True
    )
    assert [type(error) for error in found] == [ZeroDivisionError] * 3


async def test_single_flight_tells_every_caller_that_it_has_turned_slow() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    told: list[int] = []
    turn, go = asyncio.Event(), asyncio.Event()

    async def make() -> int:
        await turn.wait()
        flights.turn_slow("a")
        await go.wait()
        return 1

    def ask(n: int) -> asyncio.Task[int]:
        return asyncio.create_task(flights.run("a", make, lambda: told.append(n)))

    asking = [ask(1), ask(2), asyncio.create_task(flights.run("a", make))]
    await asyncio.sleep(0)
    assert told == []
    turn.set()
    await until(lambda: told == [1, 2])
    asking.append(ask(3))
    await until(lambda: told == [1, 2, 3])
    go.set()
    assert await asyncio.gather(*asking) == [1] * 4


async def test_single_flight_cancels_a_computation_without_callers() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    ended: list[str] = []

    async def make() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 0

    tasks = [asyncio.create_task(flights.run("a", make)) for _ in range(2)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert ended == []
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert ended == ["cancelled"]


async def test_single_flight_computes_forgotten_keys_again() -> None:
    kept: list[tuple[str, int]] = []
    flights: SingleFlight[str, int] = SingleFlight(lambda key, value: kept.append((key, value)))
    current: list[bool] = []
    go = asyncio.Event()

    async def make() -> int:
        await go.wait()
        current.append(flights.is_current("a"))
        return len(current)

    first = asyncio.create_task(flights.run("a", make))
    await asyncio.sleep(0)
    flights.forget("a")
    second = asyncio.create_task(flights.run("a", make))
    await asyncio.sleep(0)
    go.set()
    assert sorted(await asyncio.gather(first, second)) == [1, 2]
    assert sorted(current) == [False, True]
    assert kept == [("a", 1 + current.index(True))]  # the result of the forgotten one is dropped


async def test_single_flight_does_not_join_a_finished_computation() -> None:
    """In between its end and its being forgotten: the result is of before the question."""
    flights: SingleFlight[str, int] = SingleFlight()
    stale: list[int] = []
    probed = asyncio.Event()

    def probe() -> None:
        asking = flights.run("a", make)
        try:
            asking.send(None)
        except StopIteration as ended:
            stale.append(ended.value)
        else:
            asking.close()
        probed.set()

    async def make() -> int:
        if not probed.is_set():
            asyncio.get_running_loop().call_soon(probe)  # the next thing after this returns
        return 1

    assert await flights.run("a", make) == 1
    await probed.wait()
    assert stale == []
