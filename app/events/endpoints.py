"""HTTP routes of events, stated preferences and users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from app.core.access import Role, access
from app.core.errors import (
    AppError,
    Forbidden,
    PayloadTooLarge,
    Unprocessable,
    malformed_json,
    problem_responses,
)
from app.core.requests import (
    NDJSON,
    PageCursor,
    PageSize,
    PathId,
    StrictQuery,
    datetime_of,
    decode_cursor,
    json_response,
    loads_lenient,
    media_type,
    next_cursor,
    outcome_response,
    parse_json,
    read_body,
)
from app.core.security import caller_of, check_user
from app.core.tables import now_us
from app.events.schemas import (
    AppendResult,
    EventIn,
    EventOut,
    EventPage,
    EventsAnswer,
    PreferenceAnswer,
    PreferenceIn,
    PreferencesAnswer,
    Rejection,
)
from app.events.service import EventService

router = APIRouter(tags=["events"], route_class=StrictQuery)

MAX_LINE_BYTES = 64 * 1024
STREAM_GROUP_ROWS = 500
STREAM_GROUP_BYTES = 2**20
STREAM_GROUP_SECONDS = 0.1  # from a group's first line: whoever streams may pause at any time
# A stream may be endless, but its rejections are held in memory until the answer.
MAX_STREAM_REJECTED = 10_000


async def _service(request: Request) -> EventService:
    service: EventService = request.app.state.services.events
    return service


Service = Annotated[EventService, Depends(_service)]


def _one_or_many(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"schema": {"oneOf": [schema, {"type": "array", "items": schema, "maxItems": 10_000}]}}


@router.post(
    "/events",
    summary="Record events",
    # The hot path: a response model takes longer than all else.
    response_model=None,
    responses={
        200: {"model": EventsAnswer, "description": "The result of each row."},
        **problem_responses(400, 413, 415, 422, 503),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "An event, a list of at most 10,000 events, or NDJSON with an event "
            "in each line.",
            "content": {
                "application/json": _one_or_many(EventIn),
                "application/x-ndjson": {"schema": {"type": "string"}},
            },
        }
    },
)
@access(Role.EVENTS, streamed=True, for_tokens=True)
async def post_events(request: Request, service: Service) -> Response:
    """Responds after the accepted events are stored durably.

    Rejected rows do not affect the other rows. A request with a token has a JSON body, and its rows
    are about the user of the token and about known items.
    """
    caller = caller_of(request)
    if media_type(request.scope) == NDJSON:
        if caller.user is not None:  # a stream may go on long after the token has expired
            raise Forbidden("a request with a token must send JSON", code="token_not_enough")
        rows: list[Any] = []
        result = await _add_stream(request, service)
    else:
        body = await _read_lenient(request)
        rows = [body] if isinstance(body, dict) else body
        if not isinstance(rows, list):
            raise Unprocessable("the body must be an event or a list of events")
        _check_length(rows, service.settings.max_events, "events")
        if caller.user is not None:
            for row in rows:
                check_user(caller, row.get("user") if isinstance(row, dict) else None)
        known_items_only = caller.user is not None  # what a page says makes no items for everybody
        result = await service.add_rows(rows, now_us(), known_items_only=known_items_only)
    outcome = {
        "accepted": result.accepted,
        "duplicates": result.duplicates,
        "rejected": [],
        "last_seq": result.last_seq,
    }
    return await outcome_response(outcome, rows, result.rejected)


async def _read_lenient(request: Request) -> Any:
    try:
        return await parse_json(await read_body(request), loads_lenient)
    except ValueError:
        raise malformed_json() from None


def _check_length(rows: list[Any], max_rows: int, name: str) -> None:
    if len(rows) > max_rows:
        raise PayloadTooLarge(
            f"a list has at most {max_rows} {name}, this one has {len(rows)}",
            code=f"too_many_{name}",
        )


async def _add_stream(request: Request, service: EventService) -> AppendResult:
    total = AppendResult()
    last_new = last_duplicate = next_index = 0
    groups = _line_groups(request)
    try:
        async for lines in groups:
            rows, indices, rejected = _parse_lines(lines)
            result = await service.add_rows(rows, now_us(), wait=True)
            rejected += [replace(bad, index=indices[bad.index]) for bad in result.rejected]
            total.accepted += result.accepted
            total.duplicates += result.duplicates
            total.rejected += sorted(rejected)
            if result.accepted:
                last_new = max(last_new, result.last_seq)
            elif result.duplicates:
                last_duplicate = max(last_duplicate, result.last_seq)
            next_index = lines[-1][0] + 1
            if len(total.rejected) >= MAX_STREAM_REJECTED:
                total.rejected.append(
                    Rejection(next_index, "too_many_rejected", "reading stopped at this line")
                )
                break
    except AppError as error:
        # Earlier lines are stored: the client continues from here, or sends everything again.
        error.fields.update(
            accepted=total.accepted, duplicates=total.duplicates, next_index=next_index
        )
        raise
    finally:
        await groups.aclose()
    total.last_seq = last_new or last_duplicate or await service.last_seq()
    return total


def _parse_lines(
    lines: list[tuple[int, bytes | None]],
) -> tuple[list[Any], list[int], list[Rejection]]:
    """Return the rows, their indices in the stream, and the rejections of the other lines."""
    rows: list[Any] = []
    indices: list[int] = []
    rejected: list[Rejection] = []
    for index, line in lines:
        if line is None:
            detail = f"the line is longer than {MAX_LINE_BYTES} bytes"
            rejected.append(Rejection(index, "line_too_long", detail))
            continue
        try:
            rows.append(loads_lenient(line))
            indices.append(index)
        except ValueError as error:
            rejected.append(Rejection(index, "malformed_json", str(error)))
    return rows, indices, rejected


async def _line_groups(
    request: Request,
) -> AsyncGenerator[list[tuple[int, bytes | None]]]:
    """Yield groups of numbered lines; None stands for a line that is too long.

    Empty lines have no number. A group ends at its limit of rows, of bytes or of seconds.
    """
    group: list[tuple[int, bytes | None]] = []
    tail = b""
    too_long = False
    index = group_bytes = 0
    clock = asyncio.get_running_loop().time
    group_end = 0.0
    chunks = request.stream()
    following = asyncio.create_task(_next(chunks))
    try:
        while True:
            await asyncio.wait({following}, timeout=group_end - clock() if group else None)
            if group and clock() >= group_end:
                yield group
                group, group_bytes = [], 0
            if not following.done():
                continue
            chunk = following.result()
            if chunk is None:
                break
            following = asyncio.create_task(_next(chunks))
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                if too_long:
                    # The end of a line that was numbered when it grew too long.
                    too_long = False
                elif line.strip():
                    if not group:
                        group_end = clock() + STREAM_GROUP_SECONDS
                    group.append((index, line if len(line) <= MAX_LINE_BYTES else None))
                    index += 1
                    group_bytes += len(line)
                    if len(group) == STREAM_GROUP_ROWS or group_bytes >= STREAM_GROUP_BYTES:
                        yield group
                        group, group_bytes = [], 0
            if len(tail) > MAX_LINE_BYTES:
                # Dropped as it arrives: an endless line must not fill the memory.
                tail = b""
                if not too_long:
                    group.append((index, None))
                    index += 1
                    too_long = True
    finally:
        following.cancel()
    if tail.strip() and not too_long:
        group.append((index, tail))
    if group:
        yield group


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


@router.delete(
    "/events/{event_id}",
    status_code=204,
    summary="Delete an event",
    response_class=Response,
    responses=problem_responses(404, 422),
)
@access(Role.DELETE)
async def delete_event(event_id: PathId, service: Service) -> Response:
    """Deletes the event. The lists of the user change at once.

    Models change at the next training.
    """
    await service.delete_event(event_id)
    return Response(status_code=204)


@router.post(
    "/preferences",
    summary="Record a user's preferences between items",
    response_model=PreferencesAnswer,
    responses={
        200: {"description": "The result of each row of the list."},
        201: {"model": PreferenceAnswer, "description": "The preference is stored durably."},
        **problem_responses(400, 413, 415, 422, 503),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A preference, or a list of at most 10,000 preferences.",
            "content": {"application/json": _one_or_many(PreferenceIn)},
        }
    },
)
@access(Role.EVENTS)
async def post_preferences(request: Request, service: Service) -> Response:
    """Stores preferences. Both items must exist.

    In a list, rejected rows do not affect the other rows. If a user compares the same two items
    more than once, the latest preference wins. Contradictory cycles are allowed.
    """
    body = await _read_lenient(request)
    rows = body if isinstance(body, list) else [body]
    _check_length(rows, service.settings.max_events, "preferences")
    result = await service.add_preferences(rows, now_us())
    if isinstance(body, list):
        outcome = {"accepted": result.accepted, "rejected": [], "last_seq": result.last_seq}
        return await outcome_response(outcome, rows, result.rejected)
    if result.rejected:
        raise Unprocessable(result.rejected[0].detail, code=result.rejected[0].code)
    return json_response({"seq": result.last_seq}, 201)


@router.get(
    "/users/{user}/events",
    summary="List a user's events, newest first",
    responses=problem_responses(404, 422),
)
@access(Role.HISTORY)
async def get_history(
    user: PathId, service: Service, n: PageSize = 100, cursor: PageCursor = None
) -> EventPage:
    """Lists the events of a user in pages.

    The cursor is a position in the order of events. New events do not change the following pages.
    """
    events, next_below = await service.history(user, decode_cursor(cursor), n)
    return EventPage(
        items=[
            EventOut(
                seq=event.seq,
                event_id=event.event_id,
                user=user,
                item=item,
                type=event.type,
                value=event.value,
                timestamp=datetime_of(event.timestamp),
            )
            for event, item in events
        ],
        next_cursor=next_cursor(next_below),
    )


@router.delete(
    "/users/{user}",
    status_code=204,
    summary="Erase a user and all their events",
    response_class=Response,
    responses=problem_responses(404, 422),
)
@access(Role.ERASE)
async def delete_user(user: PathId, service: Service) -> Response:
    """Erases events, preferences and shown lists of the user.

    Existing models do not change until the next training.
    """
    await service.delete_user(user)
    return Response(status_code=204)
