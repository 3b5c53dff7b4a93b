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
    summary="Start a trial",
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
    """Starts a trial. Every server joins within seconds.

    One trial of each kind can run at a time. The activation of another version ends the trial.
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
    """Lists trials, newest first. Finished trials have their reports."""
    rows, following = await service.page(decode_place(cursor), n)
    items = [ABTestOut.from_row(row) for row in rows]
    return ABTestPage(items=items, next_cursor=encode_place(following))


@router.get("/{trial_id}", summary="Get a trial", responses=problem_responses(404))
@access(Role.ADMIN)
async def get_trial(service: Service, trial_id: PathId) -> ABTestOut:
    """Returns a trial with its report. A running trial has a report, too.

    For an interleaving trial, `p` and `interval` are valid only if a reader checks them once, at
    the end. Checking repeatedly and stopping at the first significant result produces false
    positives. For a settings trial, `p` and `interval` are valid at any time.
    """
    return ABTestOut.from_row(await service.get(trial_id))


@router.post("/{trial_id}/stop", summary="Stop a trial", responses=problem_responses(404, 409))
@access(Role.ADMIN)
async def stop_trial(service: Service, trial_id: PathId) -> ABTestOut:
    """Stores the current report and ends the trial. The active version remains active."""
    return ABTestOut.from_row(await service.end(trial_id))
