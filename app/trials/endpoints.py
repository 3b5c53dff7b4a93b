"""`/admin/trials`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import Response

from app.core.errors import problem_responses
from app.core.http import (
    PageCursor,
    PageSize,
    PathId,
    decode_cursor,
    invalid_body,
    json_response,
    page_response,
    read_json,
)
from app.trials.schemas import TrialOut, TrialPage, TrialParams
from app.trials.service import TrialService

router = APIRouter(tags=["trials"], prefix="/admin/trials")


async def _service(request: Request) -> TrialService:
    service: TrialService = request.app.state.services.trials
    return service


Service = Annotated[TrialService, Depends(_service)]


@router.post(
    "",
    status_code=201,
    summary="Try a version beside the active one",
    response_model=None,
    responses={201: {"model": TrialOut}, **problem_responses(400, 404, 409, 415, 422, 503)},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": TrialParams.model_json_schema()}},
        }
    },
)
async def begin(request: Request, service: Service) -> Response:
    """Interleaved, or in the shadow. Every server takes it up within seconds; one trial of each
    kind can run, and it ends when another version is activated.
    """
    try:
        params = TrialParams.model_validate(await read_json(request))
    except ValidationError as error:
        raise invalid_body(error) from None
    trial = await service.begin(params)
    return json_response(trial.as_json(), 201, {"Location": f"/admin/trials/{trial.trial_id}"})


@router.get(
    "",
    summary="List trials, newest first",
    response_model=None,
    responses={200: {"model": TrialPage}, **problem_responses(422)},
)
async def list_trials(service: Service, n: PageSize = 100, cursor: PageCursor = None) -> Response:
    """With the reports of those that have ended."""
    rows, following = await service.page(decode_cursor(cursor) or 0, n)
    return page_response([row.as_json() for row in rows], following)


@router.get(
    "/{trial_id}",
    summary="One trial",
    response_model=None,
    responses={200: {"model": TrialOut}, **problem_responses(404)},
)
async def get_trial(service: Service, trial_id: PathId) -> Response:
    """With its report, while it runs too. `p` and `interval` are for one look at the end: who looks
    every day and stops at the first good figure will see differences that are none.
    """
    return json_response((await service.get(trial_id)).as_json())


@router.post(
    "/{trial_id}/stop",
    summary="End a trial",
    response_model=None,
    responses={200: {"model": TrialOut}, **problem_responses(404, 409)},
)
async def stop_trial(service: Service, trial_id: PathId) -> Response:
    """Keeps its report as it is now. Both versions stay as they are."""
    return json_response((await service.end(trial_id)).as_json())
