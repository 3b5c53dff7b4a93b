"""Queries on events: popularity, positive events and users. On both databases."""

from __future__ import annotations

import pytest

from app.wiring import Services
from tests.app.events.support import add, event

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
    assert dict(await weighted.events.popularity()) == expected
    new = await weighted.events.new_events(0)
    assert [seq for seq, _, _ in new] == [1, 2, 3, 14, 17, 18]
    assert [seq for seq, _, _ in await weighted.events.new_events(3, limit=2)] == [14, 17]
