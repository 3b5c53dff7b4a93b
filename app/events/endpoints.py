"""`/events` and what hangs on a user."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from app.core.errors import (
    AppError,
    PayloadTooLarge,
    Unprocessable,
    malformed_json,
    problem_responses,
)
from app.core.http import (
    PageCursor,
    PageSize,
    PathId,
    decode_cursor,
    json_response,
    loads_lenient,
    page_response,
)
from app.core.metadata import now_us
from app.core.middleware import NDJSON, media_type
from app.events.schemas import (
    AppendResult,
    EventIn,
    EventPage,
    EventsAnswer,
    Rejection,
    format_timestamp,
)
from app.events.service import EventService

router = APIRouter(tags=["events"])

MAX_LINE_BYTES = 64 * 1024
STREAM_ROWS = 500
# A stream has no end by itself, but its answer must be held until it has one.
MAX_STREAM_REJECTED = 10_000


async def _service(request: Request) -> EventService:
    service: EventService = request.app.state.services.events
    return service


Service = Annotated[EventService, Depends(_service)]

_EVENT_SCHEMA = EventIn.model_json_schema()
_BODY = {
    "requestBody": {
        "required": True,
        "description": "One event, a list of at most 10,000, or NDJSON with one event a line.",
        "content": {
            "application/json": {
                "schema": {
                    "oneOf": [
                        _EVENT_SCHEMA,
                        {"type": "array", "items": _EVENT_SCHEMA, "maxItems": 10_000},
                    ]
                }
            },
            "application/x-ndjson": {"schema": {"type": "string"}},
        },
    }
}


@router.post(
    "/events",
    summary="Record events",
    response_model=None,
    responses={
        200: {"model": EventsAnswer, "description": "The verdict on the rows."},
        **problem_responses(400, 413, 415, 422, 503),
    },
    openapi_extra=_BODY,
)
async def post_events(request: Request, service: Service) -> Response:
    """Answers when what it accepts is stored for good. A row that is rejected harms no other."""
    if media_type(request.scope) == NDJSON:
        return await _post_stream(request, service)
    try:
        body = loads_lenient(await request.body())
    except ValueError:
        raise malformed_json() from None
    if isinstance(body, dict):
        body = [body]
    if not isinstance(body, list):
        raise Unprocessable("the body must be an event or a list of events")
    if len(body) > service.settings.max_events:
        raise PayloadTooLarge(
            f"a list has at most {service.settings.max_events} events, this one {len(body)}",
            code="too_many_events",
        )
    return _answer(await service.add_rows(body, now_us()))


def _answer(result: AppendResult) -> Response:
    return json_response(
        {
            "accepted": result.accepted,
            "duplicates": result.duplicates,
            "rejected": [asdict(bad) for bad in result.rejected],
            "last_seq": result.last_seq,
        }
    )


async def _post_stream(request: Request, service: EventService) -> Response:
    total = AppendResult()
    fresh_seq = repeated_seq = 0
    offset = 0
    try:
        async for lines in _line_groups(request):
            rows: list[Any] = []
            bad_lines: list[Rejection] = []
            positions: list[int] = []
            for index, line in lines:
                try:
                    if line is None:
                        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
                    rows.append(loads_lenient(line))
                    positions.append(index)
                except ValueError as error:
                    code = "line_too_long" if line is None else "malformed_json"
                    bad_lines.append(Rejection(index, code, str(error)))
            result = await service.add_rows(rows, now_us(), wait=True)
            total.accepted += result.accepted
            total.duplicates += result.duplicates
            total.rejected += sorted(
                [*bad_lines, *(replace(bad, index=positions[bad.index]) for bad in result.rejected)]
            )
            if result.accepted:
                fresh_seq = max(fresh_seq, result.last_seq)
            elif result.duplicates:
                repeated_seq = max(repeated_seq, result.last_seq)
            offset = lines[-1][0] + 1
            if len(total.rejected) >= MAX_STREAM_REJECTED:
                total.rejected.append(
                    Rejection(offset, "too_many_rejected", "reading stopped at this line")
                )
                break
    except AppError as error:
        # What came before is stored; the client goes on from here, or sends all of it again.
        error.fields.update(accepted=total.accepted, duplicates=total.duplicates, next_index=offset)
        raise
    total.last_seq = fresh_seq or repeated_seq or await service.last_seq()
    return _answer(total)


async def _line_groups(
    request: Request,
) -> AsyncIterator[list[tuple[int, bytes | None]]]:
    """Numbered lines in groups; None stands for a line that is too long. Empty lines count not."""
    group: list[tuple[int, bytes | None]] = []
    tail = b""
    too_long = False
    index = 0
    async for chunk in request.stream():
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            if too_long:
                # The end of a line that was counted when it grew too long.
                too_long = False
            elif line.strip():
                group.append((index, line if len(line) <= MAX_LINE_BYTES else None))
                index += 1
                if len(group) == STREAM_ROWS:
                    yield group
                    group = []
        if len(tail) > MAX_LINE_BYTES:
            # Dropped as it comes: a line without an end must not fill the memory.
            tail = b""
            if not too_long:
                group.append((index, None))
                index += 1
                too_long = True
    if tail.strip() and not too_long:
        group.append((index, tail))
    if group:
        yield group


@router.delete(
    "/events/{event_id}",
    status_code=204,
    summary="Delete an event",
    response_class=Response,
    responses=problem_responses(404, 422),
)
async def delete_event(event_id: PathId, service: Service) -> Response:
    """The user's lists change with it; the models do when they are trained again."""
    await service.delete_event(event_id)
    return Response(status_code=204)


@router.get(
    "/users/{user}/events",
    summary="A user's events, newest first",
    response_model=None,
    responses={200: {"model": EventPage}, **problem_responses(404, 422)},
)
async def get_history(
    user: PathId, service: Service, n: PageSize = 100, cursor: PageCursor = None
) -> Response:
    """Pages stay stable while events come in: the cursor is a place in the order of events."""
    events, following = await service.history(user, decode_cursor(cursor), n)
    return page_response(
        [
            {
                "seq": event.seq,
                "event_id": event.event_id,
                "user": user,
                "item": item,
                "type": event.type,
                "value": event.value,
                "timestamp": format_timestamp(event.timestamp),
            }
            for event, item in events
        ],
        following,
    )


@router.delete(
    "/users/{user}",
    status_code=204,
    summary="Erase a user and all their events",
    response_class=Response,
    responses=problem_responses(404, 422),
)
async def delete_user(user: PathId, service: Service) -> Response:
    """Models that were trained on the events are not changed by it."""
    await service.delete_user(user)
    return Response(status_code=204)
