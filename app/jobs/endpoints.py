"""`/admin/train` and `/admin/jobs`."""

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
from app.jobs.schemas import JobAccepted, JobOut, JobPage, TrainParams
from app.jobs.service import JobService

router = APIRouter(tags=["jobs"], prefix="/admin")


async def _service(request: Request) -> JobService:
    service: JobService = request.app.state.services.jobs
    return service


Service = Annotated[JobService, Depends(_service)]


@router.post(
    "/train",
    status_code=202,
    summary="Train a model from the events",
    response_model=None,
    responses={202: {"model": JobAccepted}, **problem_responses(400, 415, 422)},
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": TrainParams.model_json_schema()}},
        }
    },
)
async def train(request: Request, service: Service) -> Response:
    """Queues a job for a worker; the new model is served once it is published."""
    body = await read_json(request) if await request.body() else {}
    try:
        params = TrainParams.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error) from None
    job_id = await service.submit_training(params)
    return json_response({"job_id": job_id}, 202, {"Location": f"/admin/jobs/{job_id}"})


@router.get(
    "/jobs",
    summary="List jobs, newest first",
    response_model=None,
    responses={200: {"model": JobPage}, **problem_responses(422)},
)
async def list_jobs(service: Service, n: PageSize = 100, cursor: PageCursor = None) -> Response:
    """History stays."""
    rows, following = await service.page(decode_cursor(cursor) or 0, n)
    return page_response([row.as_json() for row in rows], following)


@router.get(
    "/jobs/{job_id}",
    summary="One job",
    response_model=None,
    responses={200: {"model": JobOut}, **problem_responses(404)},
)
async def get_job(service: Service, job_id: PathId) -> Response:
    """With its progress while it runs."""
    return json_response((await service.get(job_id)).as_json())


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job",
    response_model=None,
    responses={200: {"model": JobOut}, **problem_responses(404, 409)},
)
async def cancel_job(service: Service, job_id: PathId) -> Response:
    """One that waits is cancelled at once, one that runs within a few seconds."""
    return json_response((await service.cancel(job_id)).as_json())
