"""Queries on events, and the snapshot that a training reads. On both databases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.schemas import NewEvent
from app.events.snapshot_query import snapshot_query
from app.events.training_snapshot import take_snapshot
from app.wiring import Services, build_services
from tests.app.conftest import interactions_of
from tests.app.events.conftest import add, event

pytestmark = pytest.mark.anyio


async def test_popularity_counts_users_with_positive_events_only(weighted: Services) -> None:
    rows = [event(f"u{n}", "liked", "click") for n in range(3)]
    rows += [event(f"u{n}", "viewed", "view") for n in range(5)]
    rows += [event(f"u{n}", "hated", "dislike") for n in range(5)]
    rows += [
        event("u1", "hated", "click"),
        event("u1", "liked", "view"),
        event("u9", "liked", "view"),
    ]
    rows += [event("u2", "liked", "purchase"), event("u2", "rated", "rating", 4.0)]
    await add(weighted, *rows)
    items = await weighted.catalog.ids_of({"liked", "hated", "rated"})
    expected = {items["liked"]: 3, items["hated"]: 1, items["rated"]: 1}
    assert dict((await weighted.events.popularity())[1]) == expected
    new = await weighted.events.new_events(0)
    assert [seq for seq, _, _ in new] == [1, 2, 3, 14, 17, 18]
    assert [seq for seq, _, _ in await weighted.events.new_events(3, limit=2)] == [14, 17]


FEEDBACK = r"""{"b%'\"": 5, "rating": [{"from": 4, "weight": 1}, {"weight": -0.5}]}"""


async def test_a_snapshot_reads_every_event(services: Services) -> None:
    rows = [
        NewEvent(f"e{k}", f"u{k % 3}", f"i{k % 4}", "t" if k % 5 else "dislike", k / 8, 10**15 - k)
        for k in range(40)
    ]
    await services.events.import_rows(rows)
    with snapshot_query(services.settings) as query:
        assert (query.sizes(), query.max_seq()) == ((40, 3, 4), 40)
        users, items = dict(query.users()), dict(query.items())
        events = np.concatenate(list(query.events()))
    found = {
        int(seq): (users[user], items[item], time, weight)
        for user, item, time, weight, seq in events.tolist()
    }
    assert found == {
        seq: (row.user, row.item, row.timestamp, 1 if row.type == "t" else -1)
        for seq, row in enumerate(rows, 1)
    }


async def test_a_user_who_is_erased_while_the_snapshot_is_read_is_whole_in_it(
    services: Services, tmp_path: Path
) -> None:
    """Events without a name would end the training."""
    await add(services, event("u", "a"), event("v", "a"), event("v", "b"))
    loop = asyncio.get_running_loop()

    def erase(*sizes: int) -> None:
        deleting = asyncio.run_coroutine_threadsafe(services.events.delete_user("v"), loop)
        deleting.result(timeout=10)

    during = await asyncio.to_thread(take_snapshot, services.settings, tmp_path, erase)
    with during:
        matrix = during.interactions()
    assert (list(matrix.user_ids), matrix.nnz) == (["u", "v"], 3)
    assert list(interactions_of(services).user_ids) == ["u"]
    assert list(tmp_path.glob(".ncr-*")) == []


async def test_times_by_item_are_those_of_all_events_of_the_users(services: Services) -> None:
    await services.events.import_rows(
        [
            NewEvent("1", "u", "a", timestamp=5),
            NewEvent("2", "v", "a", timestamp=6),
            NewEvent("3", "u", "b", timestamp=7),
            NewEvent("4", "w", "b", timestamp=10**18),  # not after it was accepted
            NewEvent("5", "u", "a", timestamp=2),
        ]
    )
    users = {name: number for number, name, _ in await services.events.active_users(9)}
    ids = await services.catalog.ids_of({"a", "b"})
    found = await services.events.times_by_item([users["w"], users["u"], 10**9])
    assert sorted(found.tolist())[:3] == sorted(
        [[users["u"], ids["a"], 2], [users["u"], ids["a"], 5], [users["u"], ids["b"], 7]]
    )
    assert found[:, 0].tolist() == sorted([users["u"]] * 3 + [users["w"]])
    assert 5 < found[-1, 2] <= now_us()
    assert (await services.events.times_by_item([])).shape == (0, 3)


async def test_snapshot_weights_depend_on_type_value_and_age(
    settings: Settings, tmp_path: Path
) -> None:
    day = 86_400 * 10**6
    changed = {"feedback": FEEDBACK, "feedback_half_life_days": 10.0}
    services = await build_services(settings.model_copy(update=changed))
    try:
        await services.events.import_rows(
            [
                NewEvent("1", "u", "a", "b%'\"", None, 20 * day),
                NewEvent("2", "u", "b", "rating", 4.0, 10 * day),
                NewEvent("3", "u", "c", "rating", 3.9, 0),
                NewEvent("4", "u", "d", "rating", None, 0),
                NewEvent("5", "u", "d", "other", 9.0, 10 * day),
            ]
        )
        pair = {"user": "v", "winner": "a", "loser": "b"}
        pairs = [pair | {"timestamp": 30 * 86_400}, pair | {"loser": "c", "timestamp": 0}]
        await services.events.add_preferences(pairs, 0)
        matrix = interactions_of(services)
        # Decayed to the latest of all, which is a preference of the 30th day.
        assert [matrix.item_ids[item] for item in matrix.items_of(0)] == ["b", "d", "a"]
        assert matrix.weights is not None
        assert matrix.weights.tolist() == [0.25, 0.25, 2.5]
        feedback, column = matrix.feedback, matrix.item_ids.index
        assert feedback is not None
        assert feedback.disliked.tolist() == [[0, column("c")]]
        assert feedback.disliked_weights.tolist() == [0.0625]
        assert feedback.pairs.tolist() == [
            [1, column("a"), column("c")],
            [1, column("a"), column("b")],
        ]
        assert feedback.pair_weights.tolist() == [0.125, 1]
        assert list(matrix.user_ids) == ["u", "v"]
        with take_snapshot(services.settings, tmp_path) as snapshot:
            assert snapshot.last_seq == 7
    finally:
        await services.close()


async def test_an_event_in_the_future_does_not_decay_all_others(settings: Settings) -> None:
    now, day = now_us(), 86_400 * 10**6
    changed = {"feedback_half_life_days": 10.0}
    services = await build_services(settings.model_copy(update=changed))
    try:
        far = now + 300_000 * day
        await services.events.import_rows(
            [NewEvent(str(at), "u", str(at), timestamp=at) for at in (now - 10 * day, now, far)]
        )
        weights = interactions_of(services).weights
        assert weights == pytest.approx([0.5, 1, 1], abs=0.001)
    finally:
        await services.close()


async def test_a_user_counts_once_for_an_item_however_many_events_come_and_when(
    settings: Settings,
) -> None:
    services = await build_services(settings.model_copy(update={"feedback": '{"view": 0}'}))
    try:
        rows = [("u", "a"), ("u", "b"), ("v", "b")]
        await services.events.import_rows([NewEvent(u + i, u, i) for u, i in rows])
        seq, counted = await services.events.popularity()
        ids = await services.catalog.ids_of({"a", "b"})
        assert (seq, dict(counted)) == (3, {ids["a"]: 1, ids["b"]: 2})
        new = [("u", "a"), ("w", "a"), ("w", "a"), ("v", "a")]
        await services.events.import_rows(
            [
                NewEvent("viewed", "v", "a", "view"),
                *(NewEvent(f"{n}", *r) for n, r in enumerate(new)),
            ]
        )
        # The view is no adoption, and does not make the one that follows it the second.
        adoptions = await services.events.new_adoptions(seq, 100)
        assert [is_first for _, _, is_first in adoptions] == [False, True, False, True]
        firsts = sum(is_first for _, item, is_first in adoptions if item == ids["a"])
        assert dict((await services.events.popularity())[1])[ids["a"]] == 1 + firsts
        assert not await services.events.is_retracted_since(0)
        await services.events.delete_event("ua")
        assert await services.events.is_retracted_since(seq)
    finally:
        await services.close()
