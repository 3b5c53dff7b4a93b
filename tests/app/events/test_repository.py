"""Queries on events, and the snapshot that a training reads. On both databases."""

from __future__ import annotations

import asyncio

import pytest

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.schemas import NewEvent
from app.events.training_snapshot import read_snapshot
from app.wiring import Services, build_services
from tests.app.conftest import snapshot_of
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


async def test_the_snapshot_holds_every_event_in_order(services: Services) -> None:
    empty = snapshot_of(services)
    assert (len(empty), empty.max_seq) == (0, 0)
    rows = [
        NewEvent(f"e{k}", f"u{k % 3}", f"i{k % 4}", "t" if k % 5 else "dislike", k / 8, 10**15 - k)
        for k in range(40)
    ]
    await services.events.import_rows(rows)
    loaded = snapshot_of(services)
    assert (len(loaded), loaded.max_seq) == (40, 40)

    users, items = loaded.user_ids, loaded.item_ids
    order = []
    for row_index in range(40):
        row = rows[int(loaded.seq[row_index]) - 1]
        assert users[int(loaded.user_id[row_index])] == row.user
        assert items[int(loaded.item_id[row_index])] == row.item
        assert int(loaded.timestamp[row_index]) == row.timestamp
        assert float(loaded.weight[row_index]) == (1 if row.type == "t" else -1)
        order.append((int(loaded.user_id[row_index]), row.timestamp))
    assert order == sorted(order)


async def test_a_user_who_is_erased_while_the_snapshot_is_read_is_whole_in_it(
    services: Services,
) -> None:
    """Events without a name would end the training."""
    await add(services, event("u", "a"), event("v", "a"), event("v", "b"))
    loop = asyncio.get_running_loop()

    def erase(*sizes: int) -> None:
        deleting = asyncio.run_coroutine_threadsafe(services.events.delete_user("v"), loop)
        deleting.result(timeout=10)

    during = await asyncio.to_thread(read_snapshot, services.settings, erase)
    assert list(during.interactions().user_ids) == ["u", "v"]
    assert len(during) == 3
    assert list(snapshot_of(services).interactions().user_ids) == ["u"]


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


async def test_snapshot_weights_depend_on_type_value_and_age(settings: Settings) -> None:
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
        snapshot = snapshot_of(services)
        by_seq = dict(zip(snapshot.seq.tolist(), snapshot.weight.tolist(), strict=True))
        # Decayed to the latest of all, which is a preference of the 30th day.
        assert by_seq == {1: 2.5, 2: 0.25, 3: -0.0625, 4: 0, 5: 0.25}
        assert snapshot.preference_weight.tolist() == [0.125, 1]
        ids = await services.catalog.ids_of({"a", "b", "c"})
        assert snapshot.preferences[:, 1:3].tolist() == [
            [ids["a"], ids["c"]],
            [ids["a"], ids["b"]],
        ]
        assert snapshot.preferences[:, 4].tolist() == [7, 6]
        assert snapshot.max_seq == 7
        assert len(snapshot.user_ids) == 2
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
        weights = snapshot_of(services).weight
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
