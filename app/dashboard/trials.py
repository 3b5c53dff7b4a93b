"""Pages of trials: a second version beside the active one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from app.ab_tests.schemas import ABTestParams
from app.core.access import Role, access
from app.core.errors import Unprocessable
from app.core.requests import PathId, PlaceCursor, decode_place, encode_place, invalid_body
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    ROOT,
    PageRoute,
    go_to,
    path_of,
    read_form,
    render,
    services_of,
)

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE_ROWS, VERSIONS = 25, 50


@router.get(f"{ROOT}/trials")
@access(Role.ADMIN, page=True)
async def trial_list(request: Request, cursor: PlaceCursor = None) -> Response:
    """Trials, newest first, and the form that begins one."""
    services = services_of(request)
    trials, following = await services.trials.page(decode_place(cursor), PAGE_ROWS)
    rows, _ = await services.models.page(None, VERSIONS)
    active = (await services.models.activation()).version
    return render(
        request,
        "trials.html",
        trials=trials,
        next_cursor=encode_place(following),
        active=active,
        versions=[r.version for r in rows if r.status != "deleted" and r.version != active],
    )


@router.post(f"{ROOT}/trials")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def begin(request: Request) -> Response:
    """Begins a trial."""
    form = await read_form(request)
    try:
        share = float(form.get("percent", "10")) / 100
    except ValueError:
        raise Unprocessable("percent: a number is needed") from None
    values: dict[str, Any] = {
        "kind": form.get("kind", ""), "version": form.get("version", ""), "share": share
    }  # fmt: skip
    try:
        params = ABTestParams.model_validate(values)
    except ValidationError as error:
        raise invalid_body(error) from None
    trial = await services_of(request).trials.begin(params)
    return go_to(path_of("trials", trial.trial_id))


@router.get(f"{ROOT}/trials/{{trial_id}}")
@access(Role.ADMIN, page=True)
async def trial_page(request: Request, trial_id: PathId) -> Response:
    """A trial. Its difference is shown once it has ended: looking early finds what is not there."""
    trial = await services_of(request).trials.get(trial_id)
    report = trial.report or {}
    interval = report.get("interval")
    shown = None
    if trial.status == "ended" and interval:
        reach = 1.15 * max(abs(interval[0]), abs(interval[1]), 1e-6)
        low, high = (50 + 50 * end / reach for end in interval)
        shown = {"low": round(low, 2), "width": round(high - low, 2)}
    return render(request, "trial.html", trial=trial, report=report, interval=shown)


@router.get(f"{ROOT}/trials/{{trial_id}}/stop")
@access(Role.ADMIN, page=True)
async def confirm_stop(request: Request, trial_id: PathId) -> Response:
    """Asks whether to end a trial."""
    trial = await services_of(request).trials.get(trial_id)
    return render(
        request,
        "confirm.html",
        title="End this trial?",
        question="Its report is stored as it is then. The active version stays. A trial that is "
        "stopped because of what it shows so far proves nothing.",
        button="End it",
        back=path_of("trials", trial_id),
        back_label="Let it run",
        ended=trial.status == "ended",
    )


@router.post(f"{ROOT}/trials/{{trial_id}}/stop")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def stop(request: Request, trial_id: PathId) -> Response:
    """Ends a trial."""
    await services_of(request).trials.end(trial_id)
    return go_to(path_of("trials", trial_id))
