"""Cached profiles are never staler than promised. On both databases."""

from __future__ import annotations

import asyncio

import pytest

from app.events import profile_cache
from app.events.profile import Profile
from app.events.profile_cache import ProfileCache
from app.wiring import Services
from tests.app.events.support import add, event

pytestmark = pytest.mark.anyio


class InstrumentedCache(ProfileCache):
    """Records the users that it reads from the database, and can hold reads back."""

    def __init__(self, services: Services) -> None:
        super().__init__(services.database, services.events.event_weights, 10**6)
        self.reads: list[str] = []
        self.read_done = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def read(self, user: str) -> Profile:
        """Read the profile, and wait before returning it while ``go_on`` is not set."""
        self.reads.append(user)
        profile = await super().read(user)
        self.read_done.set()
        await self.go_on.wait()
        return profile


async def test_a_profile_is_read_once_until_its_user_changes(services: Services) -> None:
    profiles = InstrumentedCache(services)
    await add(services, event("u", "a"), event("v", "a"))
    for _ in range(3):
        assert len((await profiles.get("u")).seen) == 1
        assert (await profiles.get("nobody")).user_id is None
    assert profiles.reads == ["u", "nobody"]
    await add(services, event("v", "b"))
    profile = await profiles.get("u")
    assert (profile.last_seq, profile.event_seq) == (1, 3)  # still up to date
    assert profiles.reads == ["u", "nobody"]
    await add(services, event("u", "b"), event("nobody", "a"))
    assert len((await profiles.get("u")).seen) == 2
    assert len((await profiles.get("nobody")).seen) == 1


async def test_deletions_make_the_profile_stale(services: Services) -> None:
    events, profiles = services.events, services.events.profiles
    first = event("u", "a")
    await add(services, first, event("u", "b"), event("v", "b"))
    assert len((await profiles.get("u")).seen) == 2
    await events.delete_event(first.event_id)
    profile = await profiles.get("u")
    assert (len(profile.seen), profile.last_seq) == (1, 4)
    await events.delete_user("u")
    assert (await profiles.get("u")).user_id is None
    await add(services, event("u", "c"))
    assert len((await profiles.get("u")).seen) == 1


async def test_events_at_another_server_are_seen_within_the_promised_time(
    services: Services, other: Services
) -> None:
    await add(services, event("u", "a"), event("v", "a"))
    assert len((await other.events.profiles.get("u")).seen) == 1
    assert len((await other.events.profiles.get("v")).seen) == 1
    last = (await add(services, event("u", "b"))).last_seq
    # With `min_seq` at once, else within `MAX_STALENESS_SECONDS`.
    assert len((await other.events.profiles.get("u", min_seq=last)).seen) == 2
    await add(services, event("u", "c"))
    await services.events.delete_user("v")
    await asyncio.sleep(0.1)
    assert len((await other.events.profiles.get("u")).seen) == 3
    assert (await other.events.profiles.get("v")).user_id is None
    assert (await other.events.profiles.get("u", min_seq=99)).event_seq == 5


async def test_all_profiles_are_dropped_after_very_many_events(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "MAX_DELTA_EVENTS", 10)
    profiles = InstrumentedCache(services)
    await add(services, event("u", "a"))
    await profiles.get("u")
    await add(services, *(event("v", f"i{n}") for n in range(20)))
    await profiles.get("u")
    assert profiles.reads == ["u", "u"]


async def test_a_read_that_began_before_an_event_is_not_cached(services: Services) -> None:
    profiles = InstrumentedCache(services)
    await add(services, event("u", "a"))
    await profiles.get("w")
    profiles.read_done.clear()
    profiles.go_on.clear()
    early = asyncio.create_task(profiles.get("u"))
    await profiles.read_done.wait()
    await add(services, event("u", "b"))
    held, profiles.go_on = profiles.go_on, asyncio.Event()
    profiles.go_on.set()
    assert len((await profiles.get("u")).seen) == 2  # does not wait for the read that is held
    held.set()
    assert len((await early).seen) == 1
    assert len((await profiles.get("u")).seen) == 2


@pytest.mark.slow
async def test_many_servers_and_writers_never_see_less_than_was_acknowledged(
    services: Services, other: Services
) -> None:
    """Each user posts and asks in turns, here and there; every answer holds all they posted."""

    async def use(user: str, here: Services, there: Services) -> None:
        for n in range(12):
            result = await add(here, event(user, f"i{n}"))
            profile = await here.events.profiles.get(user)
            assert len(profile.seen) == n + 1
            assert profile.event_seq >= result.last_seq
            elsewhere = await there.events.profiles.get(user, min_seq=result.last_seq)
            assert len(elsewhere.seen) == n + 1

    pairs = [(services, other), (other, services)]
    await asyncio.gather(*(use(f"u{n}", *pairs[n % 2]) for n in range(8)))


async def test_a_shared_read_is_as_new_as_each_of_its_requests(services: Services) -> None:
    """The read began before the second request; since then only another user has changed."""
    profiles = InstrumentedCache(services)
    await add(services, event("u", "a"))
    profiles.go_on.clear()
    early = asyncio.create_task(profiles.get("u"))
    await profiles.read_done.wait()
    last_seq = (await add(services, event("v", "new item"))).last_seq
    late = asyncio.create_task(profiles.get("u", min_seq=last_seq))
    await asyncio.sleep(0.05)
    profiles.go_on.set()
    profile = await late
    assert profiles.reads == ["u"]
    assert profile.event_seq >= last_seq
    catalogue = await services.catalog.catalogue(profile.catalog_seq)
    assert "new item" in catalogue.internal_ids
    assert (await early).last_seq == profile.last_seq == 1


async def test_a_gap_in_the_seqs_drops_all_profiles(services: Services) -> None:
    """As versions before the table of retractions left it when they deleted an event."""
    profiles, first = services.events.profiles, event("u", "a")
    await add(services, first, event("u", "b"))
    assert len((await profiles.get("u")).seen) == 2
    async with services.database.write() as conn:
        await conn.exec_driver_sql(f"DELETE FROM events WHERE event_id = '{first.event_id}'")
        await conn.exec_driver_sql("UPDATE counters SET value = 3 WHERE name = 'event_seq'")
        await conn.exec_driver_sql("UPDATE users SET last_seq = 3")
    assert len((await profiles.get("u")).seen) == 1
