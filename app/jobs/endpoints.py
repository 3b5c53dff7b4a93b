"""HTTP routes of trainings, exports and jobs: `/admin/train`, `/admin/export`, `/admin/jobs`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from pydantic import ValidationError

from app.core.access import Role, access
from app.core.errors import problem_responses
from app.core.openapi import inline_schema
from app.core.requests import (
    OptionalJson,
    PageSize,
    PathId,
    PlaceCursor,
    StrictQuery,
    decode_place,
    encode_place,
    invalid_body,
)
from app.core.security import CallerId
from app.jobs.schemas import ExportParams, JobAccepted, JobOut, JobPage, JobRow, TrainParams
from app.jobs.service import JobService

router = APIRouter(tags=["jobs"], prefix="/admin", route_class=StrictQuery)


async def _service(request: Request) -> JobService:
    service: JobService = request.app.state.services.jobs
    return service


Service = Annotated[JobService, Depends(_service)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[!-~]+$",
        description="A value that the client chooses for a job, such as a UUID.",
    ),
]


@router.post(
    "/train",
    status_code=202,
    summary="Train a model from the events",
    responses=problem_responses(400, 409, 415, 422),
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": TrainParams.model_json_schema()}},
        }
    },
)
@access(Role.ADMIN)
async def train(
    body: OptionalJson,
    response: Response,
    service: Service,
    by: CallerId,
    idempotency_key: IdempotencyKey = None,
) -> JobAccepted:
    """Queues a training job. A worker trains a model and publishes it if the gate accepts.

    A request with a known `Idempotency-Key` gets the job of the first request.
    """
    try:
        params = TrainParams.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error) from None
    job_id = await service.submit_training(params, by, idempotency_key)
    response.headers["Location"] = f"/admin/jobs/{job_id}"
    return JobAccepted(job_id=job_id)


@router.post(
    "/export",
    status_code=202,
    summary="Export tables and lists to files",
    responses=problem_responses(400, 409, 415, 422),
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": inline_schema(ExportParams)}},
        }
    },
)
@access(Role.ADMIN)
async def export(
    body: OptionalJson,
    response: Response,
    service: Service,
    by: CallerId,
    idempotency_key: IdempotencyKey = None,
) -> JobAccepted:
    """Queues an export job.

    A worker writes the files to `exports/{job_id}` in the checkpoint store. The field `metrics` of
    the job names the files with their rows, bytes and SHA-256 sums. A request with a known
    `Idempotency-Key` gets the job of the first request.
    """
    try:
        params = ExportParams.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error) from None
    job_id = await service.submit_export(params, by, idempotency_key)
    response.headers["Location"] = f"/admin/jobs/{job_id}"
    return JobAccepted(job_id=job_id)


@router.get("/jobs", summary="List jobs, newest first", responses=problem_responses(422))
@access(Role.ADMIN)
async def list_jobs(service: Service, n: PageSize = 100, cursor: PlaceCursor = None) -> JobPage:
    """Lists current jobs and the jobs that ended in the last `NCR_KEEP_JOBS_DAYS` days.

    The service keeps the job of a model version as long as the version.
    """
    jobs, following = await service.page(decode_place(cursor), n)
    return JobPage(
        items=[JobOut.model_validate(job) for job in jobs],
        next_cursor=encode_place(following),
    )


@router.get(
    "/jobs/{job_id}",
    response_model=JobOut,
    summary="Get a job",
    responses=problem_responses(404),
)
@access(Role.ADMIN)
async def get_job(service: Service, job_id: PathId) -> JobRow:
    """Returns a job. A running job has its progress."""
    return await service.get(job_id)


@router.post(
    "/jobs/{job_id}/cancel",
    response_model=JobOut,
    summary="Cancel a job",
    responses=problem_responses(404, 409),
)
@access(Role.ADMIN)
async def cancel_job(service: Service, job_id: PathId) -> JobRow:
    """Cancels a job: a queued job at once, a running job within seconds.

    A finished job gets 409.
    """
    return await service.cancel(job_id)
