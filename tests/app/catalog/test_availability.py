"""Items that come and go by their times, at the very second."""

from __future__ import annotations

import random
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.catalog import service
from app.catalog.availability import NEVER_ENDS, Availability, Window
from app.catalog.snapshot import Catalogue, CatalogueRow
from app.core.tables import now_us
from app.wiring import Services

pytestmark = pytest.mark.anyio

SECOND = 1_000_000


@pytest.mark.parametrize("seed", range(5))
def test_windows_follow_changes_and_time(seed: int) -> None:
    draw = random.Random(seed)
    windows: dict[int, Window] = {}
    state = Availability()
    for _ in range(30):
        changed = []
        for item in draw.sample(range(1, 12), draw.randint(1, 4)):
            opens = draw.choice([None, draw.randint(1, 10)])
            closes = draw.choice([None, draw.randint(11, 20)])
            changed.append(Window(item, opens, closes))
        state = state.updated(changed)
        assert state.updated(changed[:1]) is state
        windows |= {one.item: one for one in changed}
        limits = {x for one in windows.values() for x in one[1:] if x is not None}
        for now in range(25):
            gone = [
                item
                for item, opens, closes in sorted(windows.values())
                if (opens is not None and now < opens) or (closes is not None and now >= closes)
            ]
            assert state.unavailable(now).tolist() == gone
            assert state.last_change(now) == max([x for x in limits if x <= now], default=0)
            assert state.next_change(now) == min([x for x in limits if x > now], default=NEVER_ENDS)


def row(item: int, seq: int, opens: int | None = None, closes: int | None = None, **more: Any):  # type: ignore[no-untyped-def]
    base = CatalogueRow(item, f"e{item}", None, [], False, False, seq)
    return base._replace(available_from=opens, available_until=closes, **more)


def test_a_state_of_the_catalogue_tells_when_it_is_over() -> None:
    first = Catalogue().updated([row(1, 1), row(2, 1, 10, 20), row(3, 1, closes=15, hidden=True)])
    for now, visible, moment, over in (
        (0, [1], 0, 10),
        (10, [1, 2], 10, 15),
        (15, [1, 2], 15, 20),
        (19, [1, 2], 15, 20),
        (20, [1], 20, NEVER_ENDS),
    ):
        state = first.at(now)
        assert state.visible.nonzero()[0].tolist() == visible
        assert (state.moment, state.next_change) == (moment, over)
        assert state.at(now) is state
        # A change of something else leaves the time as it is.
        renamed = state.updated([row(1, 2, title="T")])
        assert renamed.visible.nonzero()[0].tolist() == visible
    late = first.at(12)
    assert late.updated([row(2, 2, 10, 20)]).shown_seq == late.shown_seq
    moved = late.updated([row(2, 2, 13, 20)]).at(12)
    assert moved.shown_seq == 2
    assert moved.visible.nonzero()[0].tolist() == [1]


async def test_an_item_comes_and_goes_in_every_list_at_its_second(
    client: httpx2.AsyncClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    now = now_us() // SECOND * SECOND + 3_600 * SECOND
    monkeypatch.setattr(service, "now_us", lambda: now)
    start = now // SECOND
    for item, window in (
        ("always", {}),
        ("later", {"available_from": start + 10}),
        ("brief", {"available_from": start + 5, "available_until": start + 20}),
        ("over", {"available_until": start}),
    ):
        assert (await client.put(f"/items/{item}", json=window)).status_code == 201
        await client.post("/events", json={"user": "ann", "item": item})

    async def shown(user: str = "bob") -> set[str]:
        answer = (await client.get(f"/recommend/{user}?n=50")).json()
        similar = (await client.get("/items/always/similar")).json()
        found = {item["id"] for item in answer["items"]}
        assert {item["id"] for item in similar["items"]} == found - {"always"}
        return found

    both = {"brief", "later"}
    for second, there in (
        (0, set()),
        (4, set()),
        (5, {"brief"}),
        (9, {"brief"}),
        (10, both),
        (19, both),
        (20, {"later"}),
    ):
        now = (start + second) * SECOND - 1
        await shown()
        now += 1
        assert await shown() == {"always"} | there, second
        state = await services.catalog.catalogue()
        assert await services.catalog.catalogue() is state
    assert (await client.patch("/items/later", json={"available_from": None})).status_code == 200
    await client.patch("/items/always", json={"available_until": start})
    assert await shown() == {"later"}


async def test_times_are_kept_shown_and_checked(client: httpx2.AsyncClient) -> None:
    body = {"available_from": "2030-01-01T00:00:00+01:00", "available_until": 1_900_000_000.5}
    created = (await client.put("/items/a", json=body)).json()
    assert created["available_from"] == "2029-12-31T23:00:00Z"
    assert created["available_until"] == "2030-03-17T17:46:40.500000Z"
    assert (await client.get("/items/a")).json() == created
    patched = (await client.patch("/items/a", json={"available_from": None})).json()
    assert patched["available_from"] is None
    assert patched["available_until"] == created["available_until"]
    assert (await client.patch("/items/a", json={"title": "T"})).json() == patched | {"title": "T"}
    replaced = (await client.put("/items/a", json={})).json()
    assert replaced["available_until"] is None
    for wrong, code in (
        ({"available_from": "soon"}, "invalid_available_from"),
        ({"available_from": True}, "invalid_available_from"),
        ({"available_until": -1}, "invalid_available_until"),
        ({"available_until": [1]}, "invalid_available_until"),
        ({"available_from": 10, "available_until": 10}, "invalid_available_until"),
    ):
        response = await client.put("/items/a", json=wrong)
        assert (response.status_code, response.json()["code"]) == (422, code)
    rows = [{"id": "x", "available_from": 5}, {"id": "y", "available_from": "x"}]
    answer = (await client.post("/items", json=rows)).json()
    assert answer["accepted"] == 1
    assert answer["rejected"][0]["code"] == "invalid_available_from"
