"""Pages of jobs: the running training, earlier jobs, and the start of a training."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from app.core.access import Role, access
from app.core.requests import PathId, PlaceCursor, decode_place, encode_place, invalid_body
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    ROOT,
    PageRoute,
    caller_id,
    go_to,
    path_of,
    read_form,
    render,
    services_of,
)
from app.jobs.schemas import ENDED, JobRow, TrainParams
from ncr_core.recipes import AUTO_RECIPE, SERVICE_RECIPES

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE_ROWS = 25
RECIPES = (AUTO_RECIPE, *(name for name in SERVICE_RECIPES if name != AUTO_RECIPE))


@router.get(f"{ROOT}/jobs")
@access(Role.ADMIN, page=True)
async def job_list(request: Request, cursor: PlaceCursor = None) -> Response:
    """Jobs, newest first, with the running job on top."""
    jobs, following = await services_of(request).jobs.page(decode_place(cursor), PAGE_ROWS)
    running = [job for job in jobs if job.status == "running"]
    return render(
        request,
        "jobs.html",
        jobs=jobs,
        running=[(job, curve_chart(job)) for job in running],
        live_state=state_of,
        next_cursor=encode_place(following),
        recipes=RECIPES,
        chosen=services_of(request).settings.effective_default_recipe,
    )


@router.post(f"{ROOT}/jobs")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def start_training(request: Request) -> Response:
    """Queues a training with a recipe."""
    form = await read_form(request)
    values: dict[str, Any] = {}
    if form.get("recipe"):
        values["recipe"] = form["recipe"]
    if form.get("start") == "warm":
        values["start"] = "warm"
    try:
        params = TrainParams.model_validate(values)
    except ValidationError as error:
        raise invalid_body(error) from None
    job_id = await services_of(request).jobs.submit_training(params, caller_id(request))
    return go_to(path_of("jobs", job_id))


@router.get(f"{ROOT}/jobs/{{job_id}}")
@access(Role.ADMIN, page=True)
async def job_page(request: Request, job_id: PathId) -> Response:
    """A job: its curve, phase and time left, or how it ended."""
    job = await services_of(request).jobs.get(job_id)
    return render(request, "job.html", job=job, chart=curve_chart(job), live_state=state_of)


@router.get(f"{ROOT}/jobs/{{job_id}}/live")
@access(Role.ADMIN, page=True)
async def job_part(
    request: Request, job_id: PathId, seen: Annotated[str, Query(max_length=100)] = ""
) -> Response:
    """The part of the page that changes while a job runs; 204 without a change."""
    job = await services_of(request).jobs.get(job_id)
    if seen == state_of(job):
        return Response(status_code=204)
    return render(request, "_job.html", job=job, chart=curve_chart(job), live_state=state_of)


@router.get(f"{ROOT}/jobs/{{job_id}}/cancel")
@access(Role.ADMIN, page=True)
async def confirm_cancel(request: Request, job_id: PathId) -> Response:
    """Asks whether to cancel a job."""
    job = await services_of(request).jobs.get(job_id)
    return render(
        request,
        "confirm.html",
        title="Cancel this job?",
        question=f"The job {job.job_id} is {job.status}. What it has trained so far is lost; "
        "the version that is served stays.",
        button="Cancel the job",
        back=path_of("jobs", job_id),
        back_label="Keep it",
        ended=job.status in ENDED,
    )


@router.post(f"{ROOT}/jobs/{{job_id}}/cancel")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def cancel(request: Request, job_id: PathId) -> Response:
    """Cancels a job."""
    await services_of(request).jobs.cancel(job_id)
    return go_to(path_of("jobs", job_id))


def state_of(job: JobRow) -> str:
    """A short text of the values that the live part of a job's page depends on."""
    progress = job.progress or {}
    shown = map(progress.get, ("phase", "epoch", "eta_s", "peak_bytes"))
    parts = (job.status, job.cancel_requested, *shown)
    return "|".join(map(str, parts))[:100]


def curve_of(job: JobRow) -> list[dict[str, Any]]:
    """Loss and NDCG@10 by epoch, of a job that runs or has ended."""
    points = (job.metrics or {}).get("curve") or (job.progress or {}).get("curve") or []
    return [point for point in points if isinstance(point, dict)]


def curve_chart(job: JobRow) -> dict[str, Any] | None:
    """The chart of a training; None for fewer than 2 epochs."""
    return chart_of_curve(curve_of(job))


def chart_of_curve(points: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The chart of consecutive epochs with marks at new phases; None for fewer than 2 epochs."""
    if len(points) < 2:
        return None
    marks = [
        {"x": n, "label": point["phase"]}
        for n, point in enumerate(points, 1)
        if n == 1 or points[n - 2]["phase"] != point["phase"]
    ]
    return {
        "x": list(range(1, len(points) + 1)),
        "time": False,
        "xlabel": "epoch",
        "marks": marks if len(marks) > 1 else [],
        "series": [
            {"label": "loss", "values": [point["loss"] for point in points]},
            {"label": "NDCG@10", "axis": "right", "values": [point["ndcg"] for point in points]},
        ],
    }
