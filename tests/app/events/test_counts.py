"""Counts of events by hour, which every server adds to."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from app.core.database import Database
from app.core.ids import hour_now
from app.events.counts import KEEP_HOURS, MAX_NAMES, OTHERS, EventCounts
from app.events.tables import event_counts
from app.wiring import Services

pytestmark = pytest.mark.anyio


async def test_servers_add_up_what_clients_sent(services: Services, database: Database) -> None:
    row = {"event_id": "e", "user": "u", "item": "i", "type": "click", "timestamp": 1}
    rows = [row, row | {"event_id": "f"}, {"user": "u"}, row | {"type": "other"}]
    await services.events.add_rows(rows, 1)
    await services.events.add_rows([row, {"user": "u", "item": "i"}], 1)
    other = EventCounts(database)
    other.add("accepted", {"click": 5})
    await other.write()
    found = await services.events.counts.since(hour_now() - 1)
    sums: dict[tuple[str, str], int] = {}
    for each in found:
        key = (each.verdict, each.name)
        sums[key] = sums.get(key, 0) + each.rows
    assert sums == {
        ("accepted", "click"): 7,
        ("accepted", "interaction"): 1,
        ("duplicate", ""): 1,
        ("rejected", "missing_item"): 1,
        ("rejected", "event_id_conflict"): 1,
    }
    by_verdict = await other.sums_since(hour_now() - 1)
    assert sums == {
        (verdict, name): n for verdict, names in by_verdict.items() for name, n in names.items()
    }
    assert await other.sums_since(hour_now() + 1) == {}


async def test_types_of_strangers_take_bounded_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = hour_now()
    monkeypatch.setattr("app.events.counts.hour_now", lambda: hour)  # the full hour makes room
    counts = EventCounts(database)
    counts.add("accepted", {f"type {n}": 1 for n in range(3 * MAX_NAMES)})
    assert len(await counts.since(0)) == MAX_NAMES + 1
    counts.add("accepted", {f"type {n}": 1 for n in range(3 * MAX_NAMES, 4 * MAX_NAMES)})
    found = await counts.since(0)  # a write in between makes none
    assert len(found) == MAX_NAMES + 1
    assert sum(each.rows for each in found) == 4 * MAX_NAMES
    assert OTHERS in {each.name for each in found}


async def test_what_could_not_be_written_is_kept_and_what_is_old_deleted(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = EventCounts(database)
    counts.add("rejected", {"code": 2})
    with monkeypatch.context() as patch:
        patch.setattr("app.events.counts.insert_many", None)
        with pytest.raises(TypeError):
            await counts.write()
    assert [each.rows for each in await counts.since(0)] == [2]
    async with database.write() as conn:
        old = event_counts.c.hour - KEEP_HOURS - 1
        await conn.execute(sa.update(event_counts).values(hour=old))
    await counts.delete_old()
    assert await counts.since(0) == []
