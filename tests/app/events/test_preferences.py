"""Stated preferences: their transaction, their place among events, and stale profiles."""

from __future__ import annotations

import asyncio

import pytest

from app.core.errors import Unavailable
from app.events.schemas import AppendResult
from app.wiring import Services
from tests.app.conftest import interactions_of
from tests.app.events.conftest import add, event, item_names, prefer

pytestmark = pytest.mark.anyio


async def test_too_many_concurrent_lists_of_preferences_are_refused(
    services: Services,
) -> None:
    await services.events.add_rows([{"user": "u", "item": i} for i in ("a", "b")], 0)
    service, rows = services.events, [{"user": "u", "winner": "a", "loser": "b"}]
    service._preference_writes.limit = 3
    results: list[AppendResult | BaseException] = await asyncio.gather(
        *(service.add_preferences(rows, 0) for _ in range(8)), return_exceptions=True
    )
    refused = [error for error in results if isinstance(error, Unavailable)]
    assert (len(refused), {error.code for error in refused}) == (5, {"backpressure"})
    assert len((await service.profiles.get("u")).preferences) == 3
    await service.add_preferences(rows, 0)


async def test_a_preference_makes_the_cached_profile_stale(
    services: Services, other: Services
) -> None:
    """Here and at another server, whose profiles of other users stay cached."""
    await add(services, event("u", "a"), event("v", "b"))
    assert len((await other.events.profiles.get("u")).pairs) == 0
    before = await other.events.profiles.get("v")
    await prefer(services, "ab")
    here = await services.events.profiles.get("u")
    assert await item_names(services, here.pairs) == ["a", "b"]
    assert (here.last_seq, here.event_seq, here.latest_seq, here.first_seq) == (3, 3, 3, 1)
    there = await other.events.profiles.get("u", min_seq=3)
    assert there.last_seq == 3
    after = await other.events.profiles.get("v")
    assert (after.last_seq, after.event_seq) == (before.last_seq, 3)
    assert await services.events.new_events(0) == [(1, 1, 1), (2, 2, 2)]


async def test_preferences_leave_no_gap_that_drops_all_profiles(services: Services) -> None:
    """Seqs of no event, preference or retraction would drop every cached profile."""
    await add(services, event("u", "a"), event("v", "b"))
    await services.events.profiles.get("v")
    cached = services.events.profiles.cache
    await prefer(services, "ab", "ba")
    await services.events.profiles.get("u")
    assert {name for name, _ in cached.items()} == {"u", "v"}


async def test_erasing_a_user_erases_their_preferences(services: Services) -> None:
    await add(services, event("u", "a"), event("v", "b"))
    await prefer(services, "ab")
    await prefer(services, "ba", user="v")
    await services.events.delete_user("u")
    assert (await services.events.profiles.get("u")).is_newcomer
    feedback = interactions_of(services).feedback
    assert feedback is not None
    assert len(feedback.pairs) == 1
    async with services.database.read() as conn:
        count = (await conn.exec_driver_sql("SELECT count(*) FROM preferences")).scalar_one()
    assert count == 1


async def test_concurrent_preferences_and_events_take_one_seq_each(services: Services) -> None:
    await add(services, *(event("x", item) for item in "ab"))

    async def one(n: int) -> int:
        row = {"user": f"u{n % 3}", "winner": "a", "loser": "b"}
        return (await services.events.add_preferences([row], 0)).last_seq

    async def other(n: int) -> int:
        return (await add(services, event(f"u{n % 3}", f"i{n}"))).last_seq

    seqs = await asyncio.gather(*(one(n) for n in range(20)), *(other(n) for n in range(20)))
    stated = sorted(seqs[:20])
    assert len(set(stated)) == 20
    assert await services.events.last_seq() == 42
    assert len((await services.events.profiles.get("u1")).preferences) == 7
