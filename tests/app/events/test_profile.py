"""A user's profile: what decides of several events about an item, and how it is kept."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from app.core.database import Database
from app.events import profile_cache, repository
from app.events.event_weights import EventWeights
from app.events.profile import Profile, latest_preferences, resolve_feedback
from app.events.profile_cache import ProfileCache, RowReader, profile_statement
from app.events.tables import retractions
from app.wiring import Services
from tests.app.conftest import until
from tests.app.events.conftest import DAY, add, event, item_names, prefer

pytestmark = pytest.mark.anyio


def test_the_latest_weight_decides_and_the_highest_weight_counts() -> None:
    items = np.array([1, 2, 3, 1, 2, 4, 1, 3, 5, 5, 5])
    weights = np.array([3, 1, -2, 1, -1, 0, 0, 2, 1, -1, 0], dtype=np.float32)
    feedback = resolve_feedback(items, weights)
    # 1: bought, clicked, then only seen. 2: clicked, then disliked. 3: disliked, then liked.
    assert feedback.liked.tolist() == [3, 7]
    assert feedback.liked_weights.tolist() == [3, 2]
    assert feedback.disliked.tolist() == [4, 9]
    assert feedback.disliked_weights.tolist() == [1, 1]
    assert feedback.only_seen.tolist() == [5]
    empty = resolve_feedback(items[:0], weights[:0])
    assert len(empty.liked) == len(empty.disliked) == len(empty.only_seen) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([2.0, 1.0, 0.0, -1.0, -3.0]))))
def test_resolved_feedback_equals_a_loop_over_events(events: list[tuple[int, float]]) -> None:
    items = np.array([item for item, _ in events], dtype=np.int64)
    weights = np.array([weight for _, weight in events], dtype=np.float32)
    feedback = resolve_feedback(items, weights)
    positive, negative, seen = {}, {}, {}
    for position, (item, weight) in enumerate(events):
        seen[item] = position
        if weight > 0:
            positive[item] = position
        if weight < 0:
            negative[item] = position
    liked = sorted(p for item, p in positive.items() if p > negative.get(item, -1))
    assert feedback.liked.tolist() == liked
    assert feedback.liked_weights.tolist() == [
        max(weight for item, weight in events if item == items[position]) for position in liked
    ]
    disliked = sorted(p for item, p in negative.items() if p > positive.get(item, -1))
    assert feedback.disliked.tolist() == disliked
    assert feedback.disliked_weights.tolist() == [-weights[position] for position in disliked]
    only_seen = sorted(p for item, p in seen.items() if item not in positive.keys() | negative)
    assert feedback.only_seen.tolist() == only_seen


def test_the_latest_preference_about_the_same_items_wins() -> None:
    pairs = np.array([[1, 2], [2, 3], [2, 1], [3, 1], [2, 3]])
    assert latest_preferences(pairs).tolist() == [2, 3, 4]  # 2 > 1, 3 > 1, 2 > 3
    of_users = np.array([[7, 1, 2], [8, 2, 1], [7, 2, 1]])
    assert latest_preferences(of_users).tolist() == [1, 2]
    assert latest_preferences(pairs[:0]).tolist() == []


async def test_a_profile_has_likes_and_dislikes_with_decayed_weights(weighted: Services) -> None:
    await add(
        weighted,
        event("u", "late", "purchase", day=20),  # the newest, though it came first
        event("u", "old", "click", day=0),
        event("u", "old", "view", day=15),
        event("u", "turned", "purchase", day=1),
        event("u", "turned", "dislike", day=2),
        event("u", "back", "rating", 1.0, day=3),
        event("u", "back", "rating", 4.5, day=10),
        event("u", "back", "rating", 3.0, day=19),
        event("u", "shrug", "rating", 3.5, day=4),
        event("u", "shrug", "view", day=5),
        event("u", "bad", "rating", 2.0, day=6),
    )
    profile = await weighted.events.profiles.get("u")
    assert await item_names(weighted, profile.positives) == ["old", "back", "late"]
    assert profile.positive_weights.tolist() == [0.25, 0.5, 3.0]
    assert await item_names(weighted, profile.disliked) == ["turned", "bad"]
    assert profile.disliked_weights == pytest.approx([2 * 2**-1.8, 2**-1.4])
    assert len(profile.seen) == 11
    assert profile.weights.tolist() == [3, 1, 0, 3, -2, -1, 1, 0, 0, 0, -1]
    assert profile.timestamps.tolist()[:2] == [20 * DAY, 0]


@pytest.mark.parametrize("limit", [1, 3, 40, 79, 80, 81])
async def test_older_events_of_a_long_history_count_once_for_each_item(
    weighted: Services, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they decide stays as it is; of their weights it is that of the deciding event."""
    draw = random.Random(limit)
    kinds = ["purchase", "click", "view", "dislike"]
    days = [draw.randrange(40) for _ in range(80)]
    await add(
        weighted,
        *(event("u", f"i{draw.randrange(9)}", draw.choice(kinds), day=day) for day in days),
    )
    await add(weighted, event("x", "a"), event("x", "b"))
    await prefer(weighted, "ab", "ba")
    profiles = weighted.events.profiles
    whole = await profiles.read("u")
    assert len(whole.seen) == 80
    monkeypatch.setattr(profile_cache, "MAX_RECENT_EVENTS", limit)
    monkeypatch.setattr(profiles._rows, "_parameters", {"limit": limit})
    profile = await profiles.read("u")
    assert len(profile.seen) <= limit + len(set(whole.seen.tolist())) + 1
    assert profile.seqs.tolist() == sorted(set(profile.seqs.tolist()) & set(whole.seqs.tolist()))
    assert profile.seqs[-limit:].tolist() == whole.seqs[-limit:].tolist()
    assert set(profile.seen.tolist()) == set(whole.seen.tolist())
    assert profile.positives.tolist() == whole.positives.tolist()
    assert profile.disliked.tolist() == whole.disliked.tolist()
    assert profile.pairs.tolist() == whole.pairs.tolist()
    found = (profile.first_seq, profile.latest_seq, profile.last_seq)
    assert found == (whole.first_seq, whole.latest_seq, whole.last_seq)


async def test_by_default_all_events_have_the_same_weight(services: Services) -> None:
    events = [event("u", i, "anything", 1.0, day) for day, i in enumerate("abca")]
    await add(services, *events)
    profile = await services.events.profiles.get("u")
    assert await item_names(services, profile.positives) == ["b", "c", "a"]
    assert profile.positive_weights.tolist() == [1, 1, 1]
    assert len(profile.disliked) == 0


async def test_the_latest_preference_in_a_profile_is_by_time_not_by_seq(services: Services) -> None:
    await add(services, *(event("x", item) for item in "abc"))
    await prefer(services, "ab", at=20)
    await prefer(services, "bc", "ca", "ac", at=10)
    await prefer(services, "ba", at=0)  # said before the first, though it came last
    profile = await services.events.profiles.get("u")
    assert await item_names(services, profile.pairs) == ["b", "c", "a", "c", "a", "b"]
    assert not profile.is_newcomer
    assert (profile.first_seq, profile.latest_seq, len(profile.seen)) == (4, 8, 0)


async def test_resolved_feedback_is_reused_while_the_user_does_not_change(
    services: Services,
) -> None:
    await add(services, event("u", "a"))
    first = await services.events.profiles.get("u")
    positives = first.positives
    await add(services, event("v", "a"))
    later = await services.events.profiles.get("u")
    assert (first.event_seq, later.event_seq) == (1, 2)
    assert later.positives is positives
    unknown = await services.events.profiles.get("nobody")
    assert (unknown.is_newcomer, unknown.first_seq, unknown.latest_seq) == (True, 0, 0)
    assert len(unknown.positives) == len(unknown.pairs) == len(unknown.disliked) == 0


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


async def test_old_retractions_are_deleted(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = event("u", "a"), event("u", "b")
    await add(services, first, second, event("u", "c"))
    for gone in (first, second):  # seqs 4 and 5
        await services.events.delete_event(gone.event_id)
    monkeypatch.setattr(repository, "KEPT_SEQS", 0)
    await services.events.delete_old_retractions()
    left = await services.database.fetch(sa.select(retractions.c.seq))
    assert [row[0] for row in left] == [5]
    assert len((await services.events.profiles.get("u")).seen) == 1


async def test_users_who_ask_at_once_are_read_together(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [f"u{n}é'\\" for n in range(40)]
    await add(
        services,
        *(event(user, f"i{n % (place + 1)}") for place, user in enumerate(users) for n in range(3)),
    )
    queries = 0
    fetch = services.database.fetch

    async def counted(*args: Any) -> Any:
        nonlocal queries
        queries += 1
        return await fetch(*args)

    monkeypatch.setattr(services.database, "fetch", counted)
    found = await asyncio.gather(*map(services.events.profiles.get, [*users, "nobody"]))
    assert queries < 10
    monkeypatch.undo()
    assert [len(set(profile.seen.tolist())) for profile in found] == [1, 2, *[3] * 38, 0]
    for user, profile in zip(users, found, strict=False):
        alone = await services.events.profiles.read(user)
        assert (alone.user_id, alone.last_seq) == (profile.user_id, profile.last_seq)
        assert alone.seqs.tolist() == profile.seqs.tolist()


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


async def test_rows_that_come_later_hide_no_gap(services: Services) -> None:
    """They are counted after the counters were read."""
    profiles, first = services.events.profiles, event("u", "a")
    await add(services, first, event("u", "b"))
    await profiles.get("u")
    async with services.database.write() as conn:
        await conn.exec_driver_sql(f"DELETE FROM events WHERE event_id = '{first.event_id}'")
        await conn.exec_driver_sql("UPDATE counters SET value = 3 WHERE name = 'event_seq'")
    await add(services, event("v", "a"))
    assert await profiles._has_gap(3)


async def test_last_seqs_are_known_without_profiles(
    services: Services, other: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "MAX_SEQS_READ", 2)
    monkeypatch.setattr(profile_cache, "FOLLOW_SECONDS", 0.0)
    profiles = services.events.profiles
    first = event("u", "a")
    await add(services, first, *(event(user, "a") for user in ("v", "w", "x", "y")))
    followed = dict.fromkeys(("u", "v", "w", "x", "nobody"), 0)

    def known() -> list[str]:
        return [user for user in (*followed, "y") if profiles.last_seq(user) is not None]

    await profiles.follow(followed)
    assert known() == ["u", "v", "w", "x"]
    assert [profiles.last_seq(user) for user in known()] == [1, 2, 3, 4]
    await other.events.delete_event(first.event_id)
    await other.events.delete_user("v")
    await add(other, event("w", "b"), event("nobody", "b"))
    await profiles.catch_up(await other.events.last_seq())
    assert known() == ["x"]
    await profiles.follow(followed)  # who changed has a profile to be read
    assert known() == ["x"]
    await profiles.follow({"u": 0, "y": 0})
    assert known() == ["u", "y"]
    monkeypatch.setattr(profile_cache, "MAX_DELTA_EVENTS", 1)
    await add(other, event("new", "b"), event("new", "c"))
    await profiles.catch_up(await other.events.last_seq())
    assert known() == []  # all were dropped
    await profiles.follow(followed)
    assert known() == ["u", "w", "x", "nobody"]


@pytest.mark.parametrize("error", [sa.exc.OperationalError, sa.exc.DBAPIError])
async def test_an_error_of_the_database_is_none_of_who_follows(
    services: Services, error: type[sa.exc.DBAPIError], monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(services, event("u", "a"))
    profiles, followed = services.events.profiles, {"u": 0}
    with monkeypatch.context() as patch:

        async def away(*_: object) -> object:
            raise error("", {}, Exception())

        patch.setattr(services.database, "fetch", away)
        await profiles.follow(followed)
    assert profiles.last_seq("u") is None
    with monkeypatch.context() as patch:  # another error, once some are known
        await add(services, event("v", "a"))
        followed["v"] = 0
        patch.setattr("app.events.profile_cache.MAX_SEQS_READ", 1)
        fetch = services.database.fetch

        async def half(statement: Any, parameters: Any = None) -> Any:
            if parameters == {"users": '["v"]'}:
                raise RuntimeError
            return await fetch(statement, parameters)

        patch.setattr(services.database, "fetch", half)
        with pytest.raises(RuntimeError):
            await profiles.follow(followed)
    assert (profiles.last_seq("u"), profiles.last_seq("v")) == (1, None)
    await profiles.follow(followed)
    assert profiles.last_seq("v") == 2


async def test_users_asked_for_during_a_query_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_cache, "MAX_USERS_READ", 3)
    monkeypatch.setattr(profile_cache, "MAX_QUERIES", 1)
    queries: list[list[str]] = []
    go_on = asyncio.Event()

    class SlowDatabase:
        async def fetch(self, _: object, parameters: dict[str, Any]) -> list[tuple[str, str]]:
            users = json.loads(parameters["users"])
            queries.append(users)
            await go_on.wait()
            if "bad" in users:
                raise ValueError("a query failed")
            return [(user, user.upper()) for user in users]

    statement = profile_statement("sqlite", EventWeights.parse(None))
    reader = RowReader(cast(Database, SlowDatabase()), statement, {})
    first = asyncio.create_task(reader.get("a"))
    await until(lambda: len(queries) == 1)
    names = ["b", "c", "a", "c", "d"]  # one is asked for again: its query began too early for that
    others = [asyncio.create_task(reader.get(name)) for name in names]
    await asyncio.sleep(0)
    others[0].cancel()
    go_on.set()
    found = await asyncio.gather(first, *others[1:])
    assert found == [("A",), ("C",), ("A",), ("C",), ("D",)]
    assert queries == [["a"], ["b", "c", "a"], ["d"]]
    failed = await asyncio.gather(reader.get("bad"), reader.get("e"), return_exceptions=True)
    assert [str(error) for error in failed] == ["a query failed"] * 2
    assert await reader.get("e") == ("E",)
