"""What training reads: every event and statement, in order and weighed. On both databases."""

from __future__ import annotations

import pytest

from app.core.metadata import now_us
from app.core.settings import Settings
from app.events.schemas import NewEvent
from app.services import Services, build_services

pytestmark = pytest.mark.anyio

FEEDBACK = r"""{"b%'\"": 5, "rating": [{"from": 4, "weight": 1}, {"weight": -0.5}]}"""


async def test_the_snapshot_holds_every_event_in_order(services: Services) -> None:
    empty = await services.events.snapshot_for_training()
    assert (len(empty), empty.max_seq) == (0, 0)
    rows = [
        NewEvent(f"e{k}", f"u{k % 3}", f"i{k % 4}", "t" if k % 5 else "dislike", k / 8, 10**15 - k)
        for k in range(40)
    ]
    await services.events.import_rows(rows)
    loaded = await services.events.snapshot_for_training()
    assert (len(loaded), loaded.max_seq) == (40, 40)

    users = await services.events.external_users(loaded.users())
    items = await services.catalog.external_ids_of(loaded.items())
    found = []
    for place in range(40):
        row = rows[int(loaded.seq[place]) - 1]
        assert users[int(loaded.user_id[place])] == row.user
        assert items[int(loaded.item_id[place])] == row.item
        assert int(loaded.timestamp[place]) == row.timestamp
        assert float(loaded.weight[place]) == (1 if row.type == "t" else -1)
        found.append((int(loaded.user_id[place]), row.timestamp))
    assert found == sorted(found)


async def test_a_snapshot_weighs_by_type_value_and_age(settings: Settings) -> None:
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
        said = {"user": "v", "winner": "a", "loser": "b"}
        stated = [said | {"timestamp": 30 * 86_400}, said | {"loser": "c", "timestamp": 0}]
        await services.events.prefer(stated, 0)
        snapshot = await services.events.snapshot_for_training()
        by_seq = dict(zip(snapshot.seq.tolist(), snapshot.weight.tolist(), strict=True))
        # Beside the latest of all, which is a preference of the 30th day.
        assert by_seq == {1: 2.5, 2: 0.25, 3: -0.0625, 4: 0, 5: 0.25}
        assert snapshot.preference_weight.tolist() == [0.125, 1]
        ids = await services.catalog.ids_of({"a", "b", "c"})
        assert snapshot.preferences[:, 1:3].tolist() == [
            [ids["a"], ids["c"]],
            [ids["a"], ids["b"]],
        ]
        assert snapshot.preferences[:, 4].tolist() == [7, 6]
        assert snapshot.max_seq == 7
        assert len(snapshot.users()) == 2
    finally:
        await services.close()


async def test_a_time_to_come_does_not_make_everything_old(settings: Settings) -> None:
    now, day = now_us(), 86_400 * 10**6
    changed = {"feedback_half_life_days": 10.0}
    services = await build_services(settings.model_copy(update=changed))
    try:
        far = now + 300_000 * day
        await services.events.import_rows(
            [NewEvent(str(at), "u", str(at), timestamp=at) for at in (now - 10 * day, now, far)]
        )
        weights = (await services.events.snapshot_for_training()).weight
        assert weights == pytest.approx([0.5, 1, 1], abs=0.001)
    finally:
        await services.close()
