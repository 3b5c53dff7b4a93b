"""Pages of trials: a second version, or other settings, beside the served version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from app.ab_tests.schemas import FOUND_DIFFERENCE, PLANNED_CLICKED, TrialSettings, parse_trial
from app.core.access import Role, access
from app.core.errors import Unprocessable
from app.core.requests import PathId, PlaceCursor, decode_place, encode_place, invalid_body
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    ROOT,
    PageRoute,
    go_to,
    kept_figures,
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
        planned=PLANNED_CLICKED,
        found_difference=FOUND_DIFFERENCE,
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
    values: dict[str, Any] = {"kind": form.get("kind", ""), "share": share}
    if version := form.get("version"):
        values["version"] = version
    if settings := _settings(form):
        values["settings"] = settings
    if planned := form.get("planned_lists"):
        values["planned_lists"] = _number("planned_lists", planned)
    if planned := form.get("planned"):
        values["planned_clicked"] = _number("planned", planned)
    try:
        params = parse_trial(values)
    except ValidationError as error:
        raise invalid_body(error) from None
    trial = await services_of(request).trials.begin(params)
    return go_to(path_of("trials", trial.trial_id))


def _settings(form: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a form fills in."""
    given = {name: form.get(name, "").strip() for name in TrialSettings.model_fields}
    return {name: _number(name, text) for name, text in given.items() if text}


def _number(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unprocessable(f"{name}: a number is needed") from None


@router.get(f"{ROOT}/trials/{{trial_id}}")
@access(Role.ADMIN, page=True)
async def trial_page(request: Request, trial_id: PathId) -> Response:
    """A trial.

    The page shows the difference of an interleaving trial from the planned size on, because early
    looks find false differences. The difference at the planned size counts, also if the trial runs
    longer. The difference of a settings trial holds at every look.
    """
    trial = await kept_figures(request).get(
        ("trial", trial_id), lambda: services_of(request).trials.get(trial_id)
    )
    report = trial.report or {}
    reached = report.get("planned")
    ended = trial.status == "ended"
    # Of a trial that ended early, or without a plan, there is nothing better than all of it.
    result = reached or (report if ended or trial.kind == "settings" else {})
    interval = result.get("interval")
    return render(
        request,
        "trial.html",
        trial=trial,
        report=report,
        result=result,
        early=ended and trial.planned_clicked is not None and reached is None,
        interval=_drawn(interval) if interval else None,
        chart=_chart(report.get("series") or [], reached) if interval else None,
    )


def _drawn(interval: Sequence[float]) -> dict[str, float]:
    """The interval in hundredths of the drawing's width, with zero in the middle."""
    reach = 1.15 * max(abs(interval[0]), abs(interval[1]), 1e-6)
    low, high = (50 + 50 * end / reach for end in interval)
    return {"low": round(low, 2), "width": round(high - low, 2)}


def _chart(series: list[dict[str, Any]], reached: dict[str, Any] | None) -> dict[str, Any] | None:
    """The chart of the difference with its interval over time; None for fewer than 2 points."""
    points = [point for point in series if point["interval"] is not None]
    if len(points) < 2:
        return None
    mark = [] if reached is None else [{"x": reached["at"] // 1_000_000, "label": "planned size"}]
    return {
        "x": [point["at"] // 1_000_000 for point in points],
        "time": True,
        "marks": mark,
        "zero": True,
        "band": [1, 2],
        "series": [
            {"label": "difference", "values": [point["difference"] for point in points]},
            {"label": "95 % from", "values": [point["interval"][0] for point in points]},
            {"label": "to", "values": [point["interval"][1] for point in points]},
            {"label": "clicked lists", "values": [point["clicked"] for point in points],
             "hidden": True},
        ],
    }  # fmt: skip


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
    kept_figures(request).forget(("trial", trial_id))
    return go_to(path_of("trials", trial_id))
