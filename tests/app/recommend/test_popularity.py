"""When items are counted, over a stand-in for the events."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from app.core.errors import Unavailable
from app.recommend import popularity
from app.recommend.popularity import PopularityRanking
from tests.app.conftest import until

pytestmark = pytest.mark.anyio


class Events:
    """Events on items; a full count waits while ``go`` is not set."""

    def __init__(self) -> None:
        self.items: list[int] = [2, 2, 1]
        self.recounts = 0
        self.deleted = False
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def last_seq(self) -> int:
        return len(self.items)

    async def new_adoptions(self, since: int, limit: int) -> list[tuple[int, int, bool]]:
        return [(seq, item, True) for seq, item in enumerate(self.items, 1) if seq > since][:limit]

    async def is_retracted_since(self, seq: int) -> bool:
        return self.deleted

    async def popularity(self) -> tuple[int, list[tuple[int, int]]]:
        self.recounts += 1
        seq = len(self.items)
        found = [(item, self.items.count(item)) for item in set(self.items)]
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return seq, found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """With new ones counted at once, and three of them more than an increment takes."""
    monkeypatch.setattr(popularity, "INCREMENT_SECONDS", 0.0)
    monkeypatch.setattr(popularity, "MAX_NEW_EVENTS", 3)
    return Events()


@pytest.fixture
def ranking(events: Events) -> PopularityRanking:
    return PopularityRanking(cast(Any, events))


async def ask(ranking: PopularityRanking, events: Events) -> list[int]:
    ranked: list[int] = (await ranking.ranked(len(events.items))).tolist()
    return ranked


@pytest.mark.parametrize("asked_before_any_event", [False, True])
async def test_the_first_ranking_is_waited_for(
    ranking: PopularityRanking, events: Events, asked_before_any_event: bool
) -> None:
    if asked_before_any_event:
        events.items, items = [], events.items
        assert await ask(ranking, events) == []
        events.items, events.recounts = items, 0
    events.go.clear()
    first = [asyncio.create_task(ask(ranking, events)) for _ in range(3)]
    done, _ = await asyncio.wait(first, timeout=0.05)
    assert not done
    events.go.set()
    assert await asyncio.gather(*first) == [[2, 1]] * 3
    assert events.recounts == 1


@pytest.mark.parametrize("why", ["many events", "a deletion"])
async def test_the_old_ranking_is_given_during_a_recount(
    ranking: PopularityRanking, events: Events, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    await ask(ranking, events)
    events.go.clear()
    events.items += [1]
    if why == "a deletion":
        events.deleted = True
        monkeypatch.setattr(popularity, "RECOUNT_SECONDS", 0.0)
    else:
        events.items += [1, 1]
    for _ in range(3):
        async with asyncio.timeout(5):
            assert await ask(ranking, events) == [2, 1]
        await asyncio.sleep(0)
    events.items += [7] * 2  # they come during the recount, and are counted after it
    events.go.set()
    await until(lambda: ranking.number == 2)
    assert events.recounts == 2
    monkeypatch.setattr(popularity, "RECOUNT_SECONDS", 300.0)
    events.deleted = False
    assert sorted(await ask(ranking, events)) == [1, 2, 7]
    assert events.recounts == 2


async def test_without_deletions_nothing_is_counted_twice(
    ranking: PopularityRanking, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popularity, "RECOUNT_SECONDS", 0.0)
    await ask(ranking, events)
    events.items += [1, 1]
    assert await ask(ranking, events) == [1, 2]
    assert events.recounts == 1


async def test_the_service_is_not_ready_during_the_first_count_and_requests_wait(
    ranking: PopularityRanking, events: Events
) -> None:
    events.go.clear()
    await ranking.start(0.01)
    assert await ranking.ready() is not None
    waiting = asyncio.create_task(ask(ranking, events))
    await asyncio.sleep(0)
    events.go.set()
    assert await waiting == [2, 1]
    assert await ranking.ready() is None
    assert events.recounts == 1


async def test_a_first_count_that_fails_is_made_again_before_the_service_is_ready(
    ranking: PopularityRanking, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popularity, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(popularity, "FIRST_COUNT_SECONDS", 0.01)
    events.error = OSError("the database has gone")
    await ranking.start(0.01)
    await until(lambda: events.recounts == 2)
    assert await ranking.ready() is not None
    with pytest.raises(Unavailable, match="the server still counts the users of items"):
        await ask(ranking, events)
    events.error = None

    async def is_ready() -> bool:
        return await ranking.ready() is None

    await until(is_ready)
    assert await ask(ranking, events) == [2, 1]


async def test_a_recount_that_fails_is_tried_again(
    ranking: PopularityRanking,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await ask(ranking, events)
    events.items += [1] * 3
    events.error = OSError("the database has gone")
    monkeypatch.setattr(popularity, "RETRY_SECONDS", 0.2)
    await ask(ranking, events)
    await until(lambda: "the database has gone" in capsys.readouterr().out)
    assert await ask(ranking, events) == [2, 1]
    assert events.recounts == 2  # not at once
    events.error = None

    async def is_new() -> bool:
        return await ask(ranking, events) == [1, 2]

    await until(is_new)
    assert events.recounts == 3


async def test_stopping_ends_a_recount(ranking: PopularityRanking, events: Events) -> None:
    await ranking.stop()
    await ask(ranking, events)
    events.go.clear()
    events.items += [1] * 3
    before = asyncio.all_tasks()
    await ask(ranking, events)
    await until(lambda: events.recounts == 2)
    await ranking.stop()
    assert asyncio.all_tasks() == before
