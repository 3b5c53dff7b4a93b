"""Pages of items: description, users, similar items, and the share of lists with the item."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.core.access import Role, access
from app.core.errors import AppError
from app.core.requests import PageCursor, PathId, decode_cursor, next_cursor
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    ROOT,
    PageRoute,
    go_to,
    lists_of,
    path_of,
    render,
    services_of,
)
from app.recommend.item_state import exposure, known_from

router = APIRouter(route_class=PageRoute, include_in_schema=False)

FOUND_ITEMS = 50
SIMILAR_ITEMS = 8
COUNTED_EVENTS = 10_000
DAY_SECONDS = 86_400

Text = Annotated[str, Query(max_length=256)]


@router.get(f"{ROOT}/items")
@access(Role.RECOMMEND, page=True)
async def item_list(request: Request, q: Text = "", cursor: PageCursor = None) -> Response:
    """Items by a part of their title, or all of them, newest first."""
    services = services_of(request)
    text = q.strip().replace("\0", "")
    following = None
    if text:
        found = await services.catalog.search(text, FOUND_ITEMS)
    else:
        found, following = await services.catalog.page(decode_cursor(cursor), FOUND_ITEMS, [])
    catalogue = await services.catalog.catalogue()
    counts = lists_of(request).popularity.counts
    users = {item.id: _count(counts, catalogue.internal_ids.get(item.id, -1)) for item in found}
    return render(
        request,
        "items.html",
        q=q,
        found=found,
        users=users,
        limit=FOUND_ITEMS,
        next_cursor=next_cursor(following),
    )


@router.get(f"{ROOT}/items/{{item}}")
@access(Role.RECOMMEND, page=True)
async def item_page(request: Request, item: PathId) -> Response:
    """An item: its description, users, similar items, and the state of the model."""
    services, feature = services_of(request), lists_of(request)
    found = await services.catalog.get(item)
    catalogue = await services.catalog.catalogue()
    internal = catalogue.internal_ids[item]
    problem = by = None
    similar: list[tuple[str, str | None, float]] = []
    try:
        by, similar = await feature.similar.preview(item, SIMILAR_ITEMS)
    except AppError as error:  # too many are being made: the page has more to show
        problem = error.detail
    days = await services.events.takers_by_day(internal, COUNTED_EVENTS)
    model = feature.models.current
    return render(
        request,
        "item.html",
        item=found,
        similar=similar,
        similar_by=by,
        problem=problem,
        users=_count(feature.popularity.counts, internal),
        rank=_rank(feature.popularity.counts, internal),
        chart=_chart(days),
        sampled=sum(n for _, n in days) >= COUNTED_EVENTS,
        counted=COUNTED_EVENTS,
        state=known_from(model, catalogue, internal),
        needed=services.settings.new_item_users,
        exposure=exposure(model, catalogue, internal),
        version=None if model is None else model.version,
    )


async def _confirm(request: Request, item: str, hidden: bool) -> Response:
    found = await services_of(request).catalog.get(item)
    name = found.title or found.id
    return render(
        request,
        "confirm.html",
        title=f"Hide {name}?" if hidden else f"Show {name} again?",
        question="A hidden item is in no list from now on. Its events stay, and models learn from "
        "them."
        if hidden
        else "It may be in lists again at once.",
        button="Hide it" if hidden else "Show it",
        back=path_of("items", item),
        back_label="Leave it",
        ended=found.hidden == hidden,
    )


@router.get(f"{ROOT}/items/{{item}}/hide")
@access(Role.CATALOG, page=True)
async def confirm_hide(request: Request, item: PathId) -> Response:
    """Asks whether to hide an item."""
    return await _confirm(request, item, True)


@router.post(f"{ROOT}/items/{{item}}/hide")
@access(Role.CATALOG, page=True, max_body_bytes=MAX_FORM_BYTES)
async def hide(request: Request, item: PathId) -> Response:
    """Hides an item."""
    await services_of(request).catalog.patch(item, {"hidden": True})
    return go_to(path_of("items", item))


@router.get(f"{ROOT}/items/{{item}}/show")
@access(Role.CATALOG, page=True)
async def confirm_show(request: Request, item: PathId) -> Response:
    """Asks whether to show an item again."""
    return await _confirm(request, item, False)


@router.post(f"{ROOT}/items/{{item}}/show")
@access(Role.CATALOG, page=True, max_body_bytes=MAX_FORM_BYTES)
async def show(request: Request, item: PathId) -> Response:
    """Shows an item again."""
    await services_of(request).catalog.patch(item, {"hidden": False})
    return go_to(path_of("items", item))


def _count(counts: np.ndarray[Any, Any], internal: int) -> int:
    return int(counts[internal]) if 0 <= internal < len(counts) else 0


def _rank(counts: np.ndarray[Any, Any], internal: int) -> int | None:
    """The item's place by its number of users, from 1; None for an item without users."""
    own = _count(counts, internal)
    return int((counts > own).sum()) + 1 if own else None


def _chart(days: list[tuple[int, int]]) -> dict[str, Any] | None:
    """The chart of events by day, or by as many days as leave at most 60 bars."""
    if not days:
        return None
    first, last = days[0][0], days[-1][0]
    width = max(1, -(-(last - first + 1) // 60))
    bars = [0] * ((last - first) // width + 1)
    for day, n in days:
        bars[(day - first) // width] += n
    return {
        "x": [(first + n * width) * DAY_SECONDS for n in range(len(bars))],
        "time": True,
        "series": [
            {"label": "events a day" if width == 1 else f"events in {width} days",
             "values": bars, "bars": True}
        ],
    }  # fmt: skip
