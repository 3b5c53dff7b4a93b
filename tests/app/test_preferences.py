"""Stated preferences over HTTP, and what profiles make of them and of events. On both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from app.core.errors import Unavailable
from app.core.settings import Settings
from app.events.profile import Profile
from app.events.schemas import NewEvent
from app.main import create_app
from app.services import Services, build_services
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio
DAY = 86_400_000_000
JSON = {"content-type": "application/json"}

FEEDBACK = """{"purchase": 3, "click": 1, "view": "seen", "dislike": -2,
    "rating": [{"from": 4, "weight": 1}, {"from": 3, "weight": "seen"}, {"weight": -1}]}"""


def event(
    user: str, item: str, kind: str = "click", value: float | None = None, day: float = 0
) -> NewEvent:
    number = event.__dict__["number"] = event.__dict__.get("number", 0) + 1
    return NewEvent(f"e{number}", user, item, kind, value, int(day * DAY))


@pytest.fixture
async def meaning(settings: Settings) -> AsyncIterator[Services]:
    """Services to which not every event is positive, and older ones count less."""
    changed = {"feedback": FEEDBACK, "feedback_half_life_days": 10.0}
    services = await build_services(settings.model_copy(update=changed))
    yield services
    await services.close()


async def named(services: Services, ids: Any) -> list[str]:
    names = await services.catalog.external_ids_of(set(ids.flatten().tolist()))
    return [names[item] for item in ids.flatten().tolist()]


async def prefer(services: Services, *pairs: str, user: str = "u", at: int = 0) -> None:
    rows = [{"user": user, "winner": p[0], "loser": p[1], "timestamp": at + 1} for p in pairs]
    result = await services.events.prefer(rows, 0)
    assert not result.rejected


async def test_more_lists_at_a_time_than_are_written_are_refused(
    services: Services,
) -> None:
    await services.events.add_rows([{"user": "u", "item": i} for i in ("a", "b")], 0)
    service, rows = services.events, [{"user": "u", "winner": "a", "loser": "b"}]
    service._stating.most = 3
    found = await asyncio.gather(
        *(service.prefer(rows, 0) for _ in range(8)), return_exceptions=True
    )
    refused = [error for error in found if isinstance(error, Unavailable)]
    assert (len(refused), {error.code for error in refused}) == (5, {"backpressure"})
    assert len((await service.profile("u")).preferences) == 3
    await service.prefer(rows, 0)


async def test_a_preference_takes_a_place_in_the_order(client: httpx2.AsyncClient) -> None:
    await client.post("/events", json=[{"user": "u", "item": i} for i in ("a", "b")])
    body = {"user": "new", "winner": "a", "loser": "b", "timestamp": 5}
    answer = await client.post("/preferences", json=body)
    assert (answer.status_code, answer.json()) == (201, {"seq": 3})
    # Once more, and the other way round: both are fine, and so is a cycle.
    assert (await client.post("/preferences", json=body)).json() == {"seq": 4}
    turned = {"user": "new", "winner": "b", "loser": "a"}
    assert (await client.post("/preferences", json=turned)).json() == {"seq": 5}
    after = await client.post("/events", json={"user": "u", "item": "c"})
    assert after.json()["last_seq"] == 6
    # The user is there, and has no events.
    history = await client.get("/users/new/events")
    assert (history.status_code, history.json()["items"]) == (200, [])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"user": "u", "winner": "a", "loser": "a"}, "same_item"),
        ({"user": "u", "winner": "nix", "loser": "nix"}, "same_item"),
        ({"user": "u", "winner": "a", "loser": "nix"}, "unknown_item"),
        ({"user": "u", "winner": "gone", "loser": "a"}, "unknown_item"),
        ({"user": "u", "winner": "a"}, "missing_loser"),
        ({"winner": "a", "loser": "b"}, "missing_user"),
        ({"user": "u", "winner": "a", "loser": 7}, "invalid_loser"),
        ({"user": "", "winner": "a", "loser": "b"}, "invalid_user"),
        ({"user": "u", "winner": "a", "loser": "b", "timestamp": "soon"}, "invalid_timestamp"),
        ({"user": "u", "winner": "a", "loser": "b", "value": 1}, "unknown_field"),
        ("a > b", "invalid_preference"),
    ],
)
async def test_what_cannot_be_a_preference(
    client: httpx2.AsyncClient, body: object, code: str
) -> None:
    items = ("a", "b", "gone")
    await client.post("/events", json=[{"user": "other", "item": item} for item in items])
    await client.delete("/items/gone")
    answer = await client.post("/preferences", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert answer.headers["content-type"] == "application/problem+json"
    # Nothing was stored, and no seq was taken.
    assert (await client.get("/users/u/events")).status_code == 404
    assert (await client.post("/events", json=[])).json()["last_seq"] == 3


async def test_a_list_gets_a_verdict_a_row(client: httpx2.AsyncClient) -> None:
    await client.post("/events", json=[{"user": "other", "item": item} for item in "ab"])
    good = {"user": "u", "winner": "a", "loser": "b"}
    rows = [3, good, good | {"loser": "nix"}, good | {"user": "v"}, good | {"loser": "a"}]
    answer = await client.post("/preferences", json=rows)
    assert answer.status_code == 200
    verdict = answer.json()
    assert (verdict["accepted"], verdict["last_seq"]) == (2, 4)
    assert [(bad["index"], bad["code"]) for bad in verdict["rejected"]] == [
        (0, "invalid_preference"),
        (2, "unknown_item"),
        (4, "same_item"),
    ]
    assert (await client.post("/preferences", json=[])).json() == {
        "accepted": 0,
        "rejected": [],
        "last_seq": 4,
    }
    assert (await client.post("/preferences", content=b"{", headers=JSON)).status_code == 400
    too_many = await client.post("/preferences", json=[1] * 10_001)
    assert (too_many.status_code, too_many.json()["code"]) == (413, "too_many_preferences")


async def test_it_needs_the_key(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"admin_key": SecretStr("0123456789abcdef")}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        body = {"user": "u", "winner": "a", "loser": "b"}
        assert (await client.post("/preferences", json=body)).status_code == 401


async def test_it_makes_what_is_kept_of_the_user_stale(services: Services) -> None:
    """Here and at another server, whose profile of others stays."""
    await services.events.add([event("u", "a"), event("v", "b")])
    other = await build_services(services.settings)
    try:
        assert len((await other.events.profile("u")).pairs) == 0
        before = await other.events.profile("v")
        await prefer(services, "ab")
        own = await services.events.profile("u")
        assert await named(services, own.pairs) == ["a", "b"]
        assert (own.last_seq, own.event_seq, own.latest_seq, own.first_seq) == (3, 3, 3, 1)
        seen = await other.events.profile("u", min_seq=3)
        assert seen.last_seq == 3
        after = await other.events.profile("v")
        assert (after.last_seq, after.event_seq) == (before.last_seq, 3)
        assert await services.events.new_events(0) == [(1, 1, 1), (2, 2, 2)]
    finally:
        await other.close()


async def test_preferences_are_in_no_gap(services: Services) -> None:
    """A look that finds seqs that belong to nothing forgets everyone: these belong to something."""
    await services.events.add([event("u", "a"), event("v", "b")])
    await services.events.profile("v")
    kept = services.events.profiles.cache
    await prefer(services, "ab", "ba")
    await services.events.profile("u")
    assert {name for name, _ in kept.items()} == {"u", "v"}


async def test_deleting_the_user_erases_them(services: Services) -> None:
    await services.events.add([event("u", "a"), event("v", "b")])
    await prefer(services, "ab")
    await prefer(services, "ba", user="v")
    await services.events.delete_user("u")
    assert (await services.events.profile("u")).is_newcomer
    snapshot = await services.events.snapshot_for_training()
    assert len(snapshot.preferences) == 1
    async with services.database.read() as conn:
        count = (await conn.exec_driver_sql("SELECT count(*) FROM preferences")).scalar_one()
    assert count == 1


async def test_many_at_once_take_one_seq_each(services: Services) -> None:
    await services.events.add([event("x", item) for item in "ab"])

    async def one(n: int) -> int:
        row = {"user": f"u{n % 3}", "winner": "a", "loser": "b"}
        return (await services.events.prefer([row], 0)).last_seq

    async def other(n: int) -> int:
        return (await services.events.add([event(f"u{n % 3}", f"i{n}")])).last_seq

    seqs = await asyncio.gather(*(one(n) for n in range(20)), *(other(n) for n in range(20)))
    stated = sorted(seqs[:20])
    assert len(set(stated)) == 20
    assert await services.events.last_seq() == 42
    assert len((await services.events.profile("u1")).preferences) == 7


async def test_a_profile_says_what_is_wanted_and_what_is_not(meaning: Services) -> None:
    await meaning.events.add(
        [
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
        ]
    )
    profile = await meaning.events.profile("u")
    assert await named(meaning, profile.positives) == ["old", "back", "late"]
    assert profile.positive_weights.tolist() == [0.25, 0.5, 3.0]
    assert await named(meaning, profile.disliked) == ["turned", "bad"]
    assert profile.disliked_weights == pytest.approx([2 * 2**-1.8, 2**-1.4])
    assert len(profile.seen) == 11
    assert profile.weights.tolist() == [3, 1, 0, 3, -2, -1, 1, 0, 0, 0, -1]
    assert profile.timestamps.tolist()[:2] == [20 * DAY, 0]


async def test_by_default_everything_is_wanted_equally(services: Services) -> None:
    await services.events.add([event("u", i, "anything", 1.0, day) for day, i in enumerate("abca")])
    profile = await services.events.profile("u")
    assert await named(services, profile.positives) == ["b", "c", "a"]
    assert profile.positive_weights.tolist() == [1, 1, 1]
    assert len(profile.disliked) == 0


async def test_what_was_stated_last_about_two_items_stands(services: Services) -> None:
    await services.events.add([event("x", item) for item in "abc"])
    await prefer(services, "ab", at=20)
    await prefer(services, "bc", "ca", "ac", at=10)
    await prefer(services, "ba", at=0)  # said before the first, though it came last
    profile = await services.events.profile("u")
    assert await named(services, profile.pairs) == ["b", "c", "a", "c", "a", "b"]
    assert not profile.is_newcomer
    assert (profile.first_seq, profile.latest_seq, len(profile.seen)) == (4, 8, 0)


async def test_what_is_worked_out_is_kept_while_nothing_happens_to_the_user(
    services: Services,
) -> None:
    await services.events.add([event("u", "a")])
    first = await services.events.profile("u")
    positives = first.positives
    await services.events.add([event("v", "a")])
    later = await services.events.profile("u")
    assert (first.event_seq, later.event_seq) == (1, 2)
    assert later.positives is positives
    unknown: Profile = await services.events.profile("nobody")
    assert (unknown.is_newcomer, unknown.first_seq, unknown.latest_seq) == (True, 0, 0)
    assert len(unknown.positives) == len(unknown.pairs) == len(unknown.disliked) == 0


async def test_only_positive_events_make_an_item_popular(meaning: Services) -> None:
    rows = [event(f"u{n}", "liked", "click") for n in range(3)]
    rows += [event(f"u{n}", "viewed", "view") for n in range(5)]
    rows += [event(f"u{n}", "hated", "dislike") for n in range(5)]
    rows += [
        event("u1", "hated", "click"),
        event("u1", "liked", "view"),
        event("u9", "liked", "view"),
    ]
    rows += [event("u2", "liked", "purchase"), event("u2", "rated", "rating", 4.0)]
    await meaning.events.add(rows)
    items = await meaning.catalog.ids_of({"liked", "hated", "rated"})
    expected = {items["liked"]: 3, items["hated"]: 1, items["rated"]: 1}
    assert dict(await meaning.events.popularity()) == expected
    new = await meaning.events.new_events(0)
    assert [seq for seq, _, _ in new] == [1, 2, 3, 14, 17, 18]
    assert [seq for seq, _, _ in await meaning.events.new_events(3, limit=2)] == [14, 17]
