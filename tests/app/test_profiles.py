"""What is kept of users is never older than it may be. All of it on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.core.settings import Settings
from app.events import profiles as module
from app.events.profile import Profile
from app.events.repository import EventRepository
from app.events.schemas import NewEvent
from app.services import Services, build_services

pytestmark = pytest.mark.anyio


def event(user: str, item: str, number: int = 0) -> NewEvent:
    return NewEvent(f"{user}-{item}-{number}", user, item, timestamp=1)


@pytest.fixture
async def other(settings: Settings, services: Services) -> AsyncIterator[Services]:
    """Another server on the same database."""
    other = await build_services(settings)
    yield other
    await other.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The users whose profiles were read from the database."""
    users: list[str] = []
    profile = EventRepository.profile

    async def counted(self: EventRepository, external_id: str) -> Profile:
        users.append(external_id)
        return await profile(self, external_id)

    monkeypatch.setattr(EventRepository, "profile", counted)
    return users


async def test_a_profile_is_read_once_until_something_happens_to_the_user(
    services: Services, reads: list[str]
) -> None:
    events = services.events
    await events.add([event("u", "a"), event("v", "a")])
    for _ in range(3):
        assert len((await events.profile("u")).seen) == 1
        assert (await events.profile("nobody")).user_id is None
    assert reads == ["u", "nobody"]
    await events.add([event("v", "b")])
    profile = await events.profile("u")
    assert (profile.last_seq, profile.event_seq) == (1, 3)  # still all there is to know
    assert reads == ["u", "nobody"]
    await events.add([event("u", "b"), event("nobody", "a")])
    assert len((await events.profile("u")).seen) == 2
    assert len((await events.profile("nobody")).seen) == 1


async def test_deletions_are_noticed(services: Services) -> None:
    events = services.events
    await events.add([event("u", "a"), event("u", "b"), event("v", "b")])
    assert len((await events.profile("u")).seen) == 2
    await events.delete_event("u-a-0")
    profile = await events.profile("u")
    assert (len(profile.seen), profile.last_seq) == (1, 4)
    await events.delete_user("u")
    assert (await events.profile("u")).user_id is None
    await events.add([event("u", "c")])
    assert len((await events.profile("u")).seen) == 1


async def test_what_another_server_takes_is_noticed_in_time(
    services: Services, other: Services
) -> None:
    await services.events.add([event("u", "a"), event("v", "a")])
    assert len((await other.events.profile("u")).seen) == 1
    assert len((await other.events.profile("v")).seen) == 1
    last = (await services.events.add([event("u", "b")])).last_seq
    # Named by its seq at once, else within the time that is promised.
    assert len((await other.events.profile("u", min_seq=last)).seen) == 2
    await services.events.add([event("u", "c")])
    await services.events.delete_user("v")
    await asyncio.sleep(0.1)
    assert len((await other.events.profile("u")).seen) == 3
    assert (await other.events.profile("v")).user_id is None
    assert (await other.events.profile("u", min_seq=99)).event_seq == 5


async def test_after_very_many_events_everything_is_read_again(
    services: Services, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY", 10)
    await services.events.add([event("u", "a")])
    await services.events.profile("u")
    await services.events.add([event("v", f"i{n}") for n in range(20)])
    await services.events.profile("u")
    assert reads == ["u", "u"]


async def test_a_read_that_began_before_an_event_is_not_kept(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = services.events
    await events.add([event("u", "a")])
    await events.profile("w")
    began, go = asyncio.Event(), asyncio.Event()
    profile = EventRepository.profile

    async def slow(self: EventRepository, external_id: str) -> Profile:
        found = await profile(self, external_id)
        if not began.is_set():
            began.set()
            await go.wait()
        return found

    monkeypatch.setattr(EventRepository, "profile", slow)
    early = asyncio.create_task(events.profile("u"))
    await began.wait()
    await events.add([event("u", "b")])
    assert len((await events.profile("u")).seen) == 2  # does not wait for the other
    go.set()
    assert len((await early).seen) == 1
    assert len((await events.profile("u")).seen) == 2


async def test_many_servers_and_writers_never_see_less_than_was_acknowledged(
    services: Services, other: Services
) -> None:
    """Each user posts and asks in turns, here and there; every answer holds all they posted."""

    async def use(user: str, here: Services, there: Services) -> None:
        for n in range(12):
            result = await here.events.add([event(user, f"i{n}")])
            own = await here.events.profile(user)
            assert len(own.seen) == n + 1
            assert own.event_seq >= result.last_seq
            elsewhere = await there.events.profile(user, min_seq=result.last_seq)
            assert len(elsewhere.seen) == n + 1

    pairs = [(services, other), (other, services)]
    await asyncio.gather(*(use(f"u{n}", *pairs[n % 2]) for n in range(8)))


async def test_a_read_that_is_joined_is_as_new_as_its_question(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read began before; nothing has happened to this user since, but to others."""
    events = services.events
    await events.add([event("u", "a")])
    began, go = asyncio.Event(), asyncio.Event()
    profile = EventRepository.profile

    async def slow(self: EventRepository, external_id: str) -> Profile:
        found = await profile(self, external_id)
        began.set()
        await go.wait()
        return found

    monkeypatch.setattr(EventRepository, "profile", slow)
    early = asyncio.create_task(events.profile("u"))
    await began.wait()
    last = (await events.add([event("v", "new item")])).last_seq
    late = asyncio.create_task(events.profile("u", min_seq=last))
    await asyncio.sleep(0.05)
    go.set()
    found = await late
    assert found.event_seq >= last
    catalogue = await services.catalog.catalogue(found.catalog_seq)
    assert "new item" in catalogue.internal_ids
    assert (await early).last_seq == found.last_seq == 1


async def test_seqs_that_belong_to_nothing_are_noticed(services: Services) -> None:
    """As a server of an earlier version leaves them when it deletes."""
    events = services.events
    await events.add([event("u", "a"), event("u", "b")])
    assert len((await events.profile("u")).seen) == 2
    async with services.database.write() as conn:
        await conn.exec_driver_sql("DELETE FROM events WHERE event_id = 'u-a-0'")
        await conn.exec_driver_sql("UPDATE counters SET value = 3 WHERE name = 'event_seq'")
        await conn.exec_driver_sql("UPDATE users SET last_seq = 3")
    assert len((await events.profile("u")).seen) == 1
