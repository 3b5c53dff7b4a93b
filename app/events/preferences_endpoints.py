"""`/preferences`."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.errors import PayloadTooLarge, Unprocessable, malformed_json, problem_responses
from app.core.http import json_response, loads_lenient
from app.core.metadata import now_us
from app.events.endpoints import Service
from app.events.preferences import PreferenceAnswer, PreferenceIn, PreferencesAnswer

router = APIRouter(tags=["events"])

_SCHEMA = PreferenceIn.model_json_schema()
_BODY = {
    "requestBody": {
        "required": True,
        "description": "One preference, or a list of at most 10,000.",
        "content": {
            "application/json": {
                "schema": {
                    "oneOf": [_SCHEMA, {"type": "array", "items": _SCHEMA, "maxItems": 10_000}]
                }
            }
        },
    }
}


@router.post(
    "/preferences",
    summary="Record what a user said to prefer",
    response_model=None,
    responses={
        200: {"model": PreferencesAnswer, "description": "The verdict on the rows of a list."},
        201: {"model": PreferenceAnswer, "description": "Stored for good."},
        **problem_responses(400, 413, 415, 422, 503),
    },
    openapi_extra=_BODY,
)
async def post_preferences(request: Request, service: Service) -> Response:
    """Of what a user says about the same two items the latest stands; cycles are fine.

    Both items must exist. In a list a row that is rejected harms no other.
    """
    try:
        body = loads_lenient(await request.body())
    except ValueError:
        raise malformed_json() from None
    rows = body if isinstance(body, list) else [body]
    if len(rows) > service.settings.max_events:
        raise PayloadTooLarge(
            f"a list has at most {service.settings.max_events} preferences, this one {len(rows)}",
            code="too_many_preferences",
        )
    result = await service.prefer(rows, now_us())
    if isinstance(body, list):
        return json_response(
            {
                "accepted": result.accepted,
                "rejected": [asdict(bad) for bad in result.rejected],
                "last_seq": result.last_seq,
            }
        )
    if result.rejected:
        raise Unprocessable(result.rejected[0].detail, code=result.rejected[0].code)
    return json_response({"seq": result.last_seq}, 201)
