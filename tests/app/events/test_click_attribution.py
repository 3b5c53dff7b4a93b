"""Which lists were clicked, and on which items."""

from __future__ import annotations

import pytest

from app.core.ids import new_recommendation_id
from app.events import click_attribution
from app.events.click_attribution import ClickAttribution
from app.events.schemas import NewEvent
from app.wiring import Services
from tests.app.events.conftest import add

pytestmark = pytest.mark.anyio


async def test_a_list_is_whole_however_often_its_items_were_clicked(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click_attribution, "PAGE_ROWS", 3)
    names = [new_recommendation_id("trial") for _ in range(3)]
    clicks = [(name, item) for name in names for item in ("a", "a", "a", "b", "a")]
    await add(
        services,
        *(
            NewEvent(f"e{n}", "u", item, recommendation_id=name)
            for n, (name, item) in enumerate(clicks)
        ),
    )
    attribution = ClickAttribution(services.database, services.events.event_weights)
    found = [clicked async for clicked in attribution.clicks("trial")]
    items = set((await services.catalog.ids_of(["a", "b"])).values())
    assert [pair for clicked in found for pair in clicked.items()] == [
        (name, items) for name in sorted(names)
    ]
