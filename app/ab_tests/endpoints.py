"""Routes of `/admin/trials`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from app.ab_tests.schemas import ABTestOut, ABTestPage, parse_trial, trial_schema
from app.ab_tests.service import ABTestService
from app.core.access import Role, access
from app.core.errors import problem_responses
from app.core.requests import (
    PageSize,
    PathId,
    PlaceCursor,
    StrictQuery,
    decode_place,
    encode_place,
    invalid_body,
    read_json,
)

router = APIRouter(tags=["trials"], prefix="/admin/trials", route_class=StrictQuery)


async def _service(request: Request) -> ABTestService:
    service: ABTestService = request.app.state.services.trials
    return service


Service = Annotated[ABTestService, Depends(_service)]


@router.post(
    "",
    status_code=201,
    summary="Test a version or settings against what is served",
    responses=problem_responses(400, 404, 409, 415, 422, 503),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": trial_schema()}},
        }
    },
)
@access(Role.ADMIN)
async def begin(request: Request, response: Response, service: Service) -> ABTestOut:
    """Begins a trial, which every server joins within seconds.

    One trial of each kind can run. It ends when another version is activated.
    """
    try:
        params = parse_trial(await read_json(request))
    except ValidationError as error:
        raise invalid_body(error) from None
    trial = await service.begin(params)
    response.headers["Location"] = f"/admin/trials/{trial.trial_id}"
    return ABTestOut.from_row(trial)


@router.get("", summary="List trials, newest first", responses=problem_responses(422))
@access(Role.ADMIN)
async def list_trials(
    service: Service, n: PageSize = 100, cursor: PlaceCursor = None
) -> ABTestPage:
    """Lists trials, those that have ended with their reports."""
    rows, following = await service.page(decode_place(cursor), n)
    items = [ABTestOut.from_row(row) for row in rows]
    return ABTestPage(items=items, next_cursor=encode_place(following))


@router.get("/{trial_id}", summary="One trial", responses=problem_responses(404))
@access(Role.ADMIN)
async def get_trial(service: Service, trial_id: PathId) -> ABTestOut:
    """Includes the report, also while the trial runs.

    `p` and `interval` of an interleaving trial are valid only if they are checked once, at the
    end. Checking repeatedly and stopping at the first significant result produces false positives.
    Those of a settings trial hold at every look.
    """
    return ABTestOut.from_row(await service.get(trial_id))


@router.post("/{trial_id}/stop", summary="End a trial", responses=problem_responses(404, 409))
@access(Role.ADMIN)
async def stop_trial(service: Service, trial_id: PathId) -> ABTestOut:
    """Stores the report as it is now. The active version stays active."""
    return ABTestOut.from_row(await service.end(trial_id))
