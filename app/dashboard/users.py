"""Pages of users: events, lists with their reasons, and lists under other conditions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from app.catalog.snapshot import Catalogue
from app.core.access import Role, access
from app.core.errors import AppError, NotFound, Unprocessable
from app.core.requests import PageCursor, PathId, decode_cursor, next_cursor, text_problem
from app.dashboard.questions import questions_soon
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    PAGE_HEADERS,
    ROOT,
    PageRoute,
    caller_has,
    go_to,
    lists_of,
    path_of,
    read_form,
    render,
    services_of,
)
from app.events.schemas import StoredEvent
from app.recommend.response import Entry
from app.recommend.schemas import UNRULED, Comparison, RecommendationQuery

router = APIRouter(route_class=PageRoute, include_in_schema=False)

FOUND_USERS, RECENT_USERS = 50, 20
SEARCHED_USERS = 100_000  # for a part of their id
SHOWN_CATEGORIES = 3
MIN_PART = 3  # characters: fewer are in nearly every id
HISTORY_ROWS = 30
LIST_ITEMS, COMPARED_ITEMS, QUESTIONS = 10, 6, 3
VERSIONS = 20
SOON_SECONDS = 0.05

Text = Annotated[str, Query(max_length=256)]


@router.get(f"{ROOT}/users")
@access(Role.HISTORY, page=True)
async def user_list(request: Request, q: Text = "") -> Response:
    """Users by the beginning or a part of their id, and the users of the last events.

    An index finds beginnings among all users. The search for parts covers only the newest users, so
    that its time does not grow with the service.
    """
    events = services_of(request).events
    text = q.strip()
    if text and text_problem(text):
        raise Unprocessable(f"q: a search {text_problem(text)}", code="invalid_id")
    found = await events.find_users(text, FOUND_USERS) if text else []
    within: list[str] = []
    users = 0
    if len(text) >= MIN_PART and len(found) < FOUND_USERS:
        users = await events.count_users()
        within = await events.users_containing(text, FOUND_USERS, SEARCHED_USERS)
        within = [user for user in within if not user.startswith(text)]
    if found == [text] and not within:
        return go_to(path_of("users", text))
    recent = [] if text else await events.recent_users(RECENT_USERS)
    return render(
        request,
        "users.html",
        q=q,
        found=found,
        within=within,
        recent=recent,
        limit=FOUND_USERS,
        min_part=MIN_PART,
        searched=SEARCHED_USERS if users > SEARCHED_USERS else None,
    )


@dataclass(frozen=True)
class ShownList:
    """A list on a page, or the reason for its absence."""

    title: str
    entries: list[dict[str, Any]]
    version: str | None = None
    problem: str | None = None


@router.get(f"{ROOT}/users/{{user}}")
@access(Role.HISTORY, page=True)
async def user_page(
    request: Request,
    user: PathId,
    model: Text = "",
    diversity: Annotated[float, Query(ge=0, le=1)] = 0.0,
    like: Text = "",
    cursor: PageCursor = None,
) -> Response:
    """A user's history beside the list, the reasons for the list, and variants of the list."""
    services, feature = services_of(request), lists_of(request)
    catalogue = await services.catalog.catalogue()
    try:
        events, following = await services.events.history(user, decode_cursor(cursor), HISTORY_ROWS)
        known = True
    except NotFound:
        events, following, known = [], None, False
    may_list = caller_has(request, Role.RECOMMEND)
    shown: list[ShownList] = []
    comparison = questions = None
    if may_list:
        query = RecommendationQuery(LIST_ITEMS, explain=True)
        first = await _list(request, "What this user gets", catalogue, user, query)
        shown.append(first)
        if like:
            second = await _what_if(request, catalogue, user, like, query)
        elif model or diversity:
            other = RecommendationQuery(
                LIST_ITEMS, explain=True, model=model or None, diversity=diversity
            )
            name = " and ".join(
                [*([f"version {model}"] if model else []),
                 *([f"diversity {diversity:g}"] if diversity else [])]
            )  # fmt: skip
            second = await _list(request, f"With {name}", catalogue, user, other)
        else:
            second = None
        if second is not None:
            shown.append(_with_moves(second, first))
        comparison = await _compare(request, user, first)
        questions = await questions_soon(request, user, QUESTIONS, SOON_SECONDS)
    versions = []
    if caller_has(request, Role.ADMIN):
        rows, _ = await services.models.page(None, VERSIONS)
        versions = [row.version for row in rows if row.status != "deleted"]
    return render(
        request,
        "user.html",
        user=user,
        known=known,
        events=[_shown_event(event, item, catalogue, services.events) for event, item in events],
        next_cursor=next_cursor(following),
        later=cursor is not None,
        lists=shown,
        may_list=may_list,
        matrix=None if comparison is None else _matrix(comparison, catalogue),
        questions=questions,
        versions=versions,
        chosen={"model": model, "diversity": diversity, "like": like},
        active=None if feature.models.current is None else feature.models.current.version,
    )


async def _list(
    request: Request, title: str, catalogue: Catalogue, user: str, query: RecommendationQuery
) -> ShownList:
    try:
        ranked, model = await lists_of(request).service.preview(user, query)
    except AppError as error:  # of a version that is gone, say: the page has more to show
        return ShownList(title, [], query.model, error.detail)
    version = None if model is None else model.version
    return ShownList(title, await entries_of(request, ranked.entries(), catalogue), version)


async def _what_if(
    request: Request, catalogue: Catalogue, user: str, item: str, query: RecommendationQuery
) -> ShownList:
    internal = catalogue.internal_ids.get(item, -1)
    name = (catalogue.titles[internal] if internal >= 0 else None) or item
    title = f"If they liked {name}"
    try:
        ranked = await lists_of(request).what_if.recommend(user, item, query)
    except AppError as error:
        return ShownList(title, [], None, error.detail)
    return ShownList(title, await entries_of(request, ranked.entries(), catalogue))


async def entries_of(
    request: Request, entries: list[Entry], catalogue: Catalogue
) -> list[dict[str, Any]]:
    """The places of a list with the categories of their items."""
    categories = await categories_of(request, [entry["id"] for entry in entries], catalogue)
    return [entry | {"categories": categories[entry["id"]]} for entry in entries]


async def categories_of(
    request: Request, items: Sequence[str], catalogue: Catalogue
) -> dict[str, list[str]]:
    """The first ``SHOWN_CATEGORIES`` categories of each item."""
    ids = {item: catalogue.internal_ids.get(item, -1) for item in items}
    described = await services_of(request).catalog.described(list(ids.values()))
    return {
        item: described[internal].categories[:SHOWN_CATEGORIES] if internal in described else []
        for item, internal in ids.items()
    }


def _with_moves(second: ShownList, first: ShownList) -> ShownList:
    """The second list with each item's rank in the first list."""
    places = {entry["id"]: entry["rank"] for entry in first.entries}
    moved = [
        entry | {"before": places.get(entry["id"]), "compared": True} for entry in second.entries
    ]
    return ShownList(second.title, moved, second.version, second.problem)


async def _compare(request: Request, user: str, shown: ShownList) -> Comparison | None:
    """The comparison of the first items; None if the model knows fewer than 2 of them."""
    ids = [entry["id"] for entry in shown.entries if entry["source"] != "popular"]
    if len(ids) < 2:
        return None
    ids = ids[:COMPARED_ITEMS]
    try:
        return await lists_of(request).rerank.compare(
            user, ids, RecommendationQuery(len(ids), **UNRULED)
        )
    except AppError:  # a model that was swapped meanwhile does not know them
        return None


def _matrix(comparison: Comparison, catalogue: Catalogue) -> list[dict[str, Any]]:
    names = [catalogue.titles[catalogue.internal_ids[item]] or item for item in comparison.items]
    return [
        {
            "name": name,
            "cells": [
                None if row == column else {"p": p, "step": min(10, int(10 * p + 0.5))}
                for column, p in enumerate(probabilities)
            ],
        }
        for row, (name, probabilities) in enumerate(zip(names, comparison.probability, strict=True))
    ]


def _shown_event(
    event: StoredEvent, item: str, catalogue: Catalogue, events: Any
) -> dict[str, Any]:
    internal = catalogue.internal_ids.get(item, -1)
    return {
        "item": item,
        "title": catalogue.titles[internal] if internal >= 0 else None,
        "type": event.type,
        "value": event.value,
        "weight": events.event_weights.weight(event.type, event.value),
        "at": event.timestamp,
        "gone": internal in catalogue.deleted,
        "event_id": event.event_id,
    }


@router.get(f"{ROOT}/users/{{user}}/export")
@access(Role.HISTORY, page=True)
async def export(request: Request, user: PathId) -> Response:
    """The stored data of a user, as NDJSON: events, then preferences."""
    events = services_of(request).events
    await events.history(user, None, 1)  # 404 before the answer begins

    async def lines() -> AsyncIterator[bytes]:
        async for chunk in events.iter_events(user):
            for event, name, item in chunk:
                row = {
                    "event_id": event.event_id,
                    "user": name,
                    "item": item,
                    "type": event.type,
                    "value": event.value,
                    "timestamp": event.timestamp / 1e6,
                    "recommendation_id": event.recommendation_id,
                }
                yield orjson.dumps({k: v for k, v in row.items() if v is not None}) + b"\n"
        async for rows in events.iter_preferences(user):
            for preference in rows:
                yield (
                    orjson.dumps(preference._asdict() | {"timestamp": preference.timestamp / 1e6})
                    + b"\n"
                )

    return StreamingResponse(
        lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="user.ndjson"', **PAGE_HEADERS},
    )


@router.get(f"{ROOT}/users/{{user}}/erase")
@access(Role.ERASE, page=True)
async def confirm_erase(request: Request, user: PathId) -> Response:
    """Asks whether to erase a user."""
    return render(
        request,
        "confirm.html",
        title="Erase this user?",
        question="All events and stated preferences of this user are deleted, and cannot be "
        "brought back. Models forget the user when they are next trained.",
        button="Erase",
        back=path_of("users", user),
        back_label="Keep the user",
        ended=False,
        field="user",
        expected=user,
    )


@router.post(f"{ROOT}/users/{{user}}/erase")
@access(Role.ERASE, page=True, max_body_bytes=MAX_FORM_BYTES)
async def erase(request: Request, user: PathId) -> Response:
    """Erases a user."""
    form = await read_form(request)
    if form.get("user") != user:
        return go_to(path_of("users", user, "erase"))
    await services_of(request).events.delete_user(user)
    return go_to(path_of("users"))
