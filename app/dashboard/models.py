"""Pages of model versions: a comparison over time, one version, and activations."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.access import Role, access
from app.core.requests import PathId, PlaceCursor, decode_place, encode_place
from app.dashboard.jobs import chart_of_curve
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    ROOT,
    PageRoute,
    caller_id,
    go_to,
    kept_figures,
    path_of,
    read_form,
    render,
    services_of,
)
from app.registry.schemas import Activation, ActivationChange, ModelRow

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE_ROWS = 25
TIMELINE_VERSIONS = 40
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 240, 46, 12, 14, 34
VERDICTS = {
    "first": "the first version",
    "not_worse": "not worse than the version before",
    "worse": "worse than the version before",
    "not_shown": "not shown to be as good as the version before",
    "too_few_users": "too few users to compare on",
    "below_popularity": "below the popularity list",
    "unknown": "not compared",
}


class Point(NamedTuple):
    """A version on the timeline, in the units of the drawing."""

    version: str
    x: float
    y: float
    low: float | None
    high: float | None
    kind: str
    served: bool
    title: str


@router.get(f"{ROOT}/models")
@access(Role.ADMIN, page=True)
async def model_list(request: Request, cursor: PlaceCursor = None) -> Response:
    """The versions over time, and each with the gate's verdict."""
    registry = services_of(request).models
    rows, following = await registry.page(decode_place(cursor), TIMELINE_VERSIONS)
    activation = await registry.activation()
    changes, _ = await registry.history(None, None, 100)
    return render(
        request,
        "models.html",
        rows=rows,
        activation=activation,
        changes=changes[:12],
        timeline=timeline(rows, activation, changes),
        verdict=verdict,
        ndcg=ndcg_of,
        next_cursor=encode_place(following),
    )


@router.get(f"{ROOT}/models/{{version}}")
@access(Role.ADMIN, page=True)
async def model_page(request: Request, version: PathId) -> Response:
    """A version: metrics, the gate's report, tried recipes, training curve and calibration."""
    services = services_of(request)
    row = await services.models.get(version)
    changes, _ = await services.models.history(version, None, 20)
    return render(
        request,
        "model.html",
        row=row,
        activation=await services.models.activation(),
        changes=changes,
        clicks=await kept_figures(request).get(
            ("clicks", version), lambda: services.models.click_through(version)
        ),
        compared=_compared(row),
        gate=row.metrics.get("gate") or {},
        verdict=verdict,
        interval=_interval(row),
        curve=chart_of_curve(row.metrics.get("curve") or []),
        reliability=_reliability(row),
    )


async def _confirm(request: Request, version: str, action: str) -> Response:
    registry = services_of(request).models
    row = await registry.get(version)
    active = (await registry.activation()).version
    doing = {
        "activate": ("Serve this version?", "Serve it"),
        "pin": ("Serve this version and keep it?", "Pin it"),
    }[action]
    question = (
        f"Every server answers with {version} within seconds; requests in progress end on "
        f"{active or 'the popular items'}. "
    )
    if action == "pin":
        question += "Versions trained later are published and not served, until it is unpinned. "
    if row.status == "rejected":
        question += "The gate rejected this version: the history will say that it was forced. "
    return render(
        request,
        "confirm.html",
        title=doing[0],
        question=question,
        button=doing[1],
        back=path_of("models", version),
        back_label="Leave it",
        ended=row.status == "deleted",
        field="version",
        expected=version,
    )


@router.get(f"{ROOT}/models/{{version}}/activate")
@access(Role.ADMIN, page=True)
async def confirm_activate(request: Request, version: PathId) -> Response:
    """Asks whether to activate a version."""
    return await _confirm(request, version, "activate")


@router.post(f"{ROOT}/models/{{version}}/activate")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def activate(request: Request, version: PathId) -> Response:
    """Activates a version."""
    return await _activate(request, version, pin=False)


@router.get(f"{ROOT}/models/{{version}}/pin")
@access(Role.ADMIN, page=True)
async def confirm_pin(request: Request, version: PathId) -> Response:
    """Asks whether to pin a version."""
    return await _confirm(request, version, "pin")


@router.post(f"{ROOT}/models/{{version}}/pin")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def pin(request: Request, version: PathId) -> Response:
    """Activates and pins a version."""
    return await _activate(request, version, pin=True)


async def _activate(request: Request, version: str, *, pin: bool) -> Response:
    form = await read_form(request)
    if form.get("version") != version:
        return go_to(path_of("models", version, "pin" if pin else "activate"))
    registry = services_of(request).models
    force = (await registry.get(version)).status == "rejected"
    await registry.activate(version, force=force, pin=pin, by=caller_id(request))
    return go_to(path_of("models"))


@router.get(f"{ROOT}/rollback")
@access(Role.ADMIN, page=True)
async def confirm_rollback(request: Request) -> Response:
    """Asks whether to activate the previous version."""
    activation = await services_of(request).models.activation()
    return render(
        request,
        "confirm.html",
        title="Go back to the version before?",
        question=f"{activation.version} is served now. Every server answers with "
        f"{activation.previous or 'the version before'} within seconds.",
        button="Roll back",
        back=path_of("models"),
        back_label="Leave it",
        ended=activation.version is None or activation.previous is None,
    )


@router.post(f"{ROOT}/rollback")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def rollback(request: Request) -> Response:
    """Activates the previous version."""
    await services_of(request).models.rollback(by=caller_id(request))
    return go_to(path_of("models"))


@router.get(f"{ROOT}/unpin")
@access(Role.ADMIN, page=True)
async def confirm_unpin(request: Request) -> Response:
    """Asks whether to remove the pin."""
    activation = await services_of(request).models.activation()
    return render(
        request,
        "confirm.html",
        title="Serve newly trained versions again?",
        question=f"{activation.version} stays until the next training is published.",
        button="Unpin",
        back=path_of("models"),
        back_label="Keep it pinned",
        ended=not activation.pinned,
    )


@router.post(f"{ROOT}/unpin")
@access(Role.ADMIN, page=True, max_body_bytes=MAX_FORM_BYTES)
async def unpin(request: Request) -> Response:
    """Removes the pin."""
    await services_of(request).models.unpin(by=caller_id(request))
    return go_to(path_of("models"))


def ndcg_of(row: ModelRow) -> float | None:
    """NDCG@10 over the whole catalogue, on the items that the version's training held out."""
    figures = row.metrics.get("full") or {}
    value = figures.get("ndcg@10")
    return value if isinstance(value, int | float) else None


def verdict(row: ModelRow) -> str:
    """The finding of the gate, in words."""
    finding = str((row.metrics.get("gate") or {}).get("finding", "unknown"))
    return VERDICTS.get(finding, finding.replace("_", " "))


def timeline(
    rows: list[ModelRow], activation: Activation, changes: list[ActivationChange]
) -> dict[str, Any] | None:
    """The drawing of NDCG@10 by version, oldest first, with the gate's interval around each value.

    The interval belongs to the difference to the version that was served at the time.
    """
    shown = [row for row in reversed(rows) if ndcg_of(row) is not None]
    if not shown:
        return None
    values: list[tuple[float, float | None, float | None]] = []
    for row in shown:
        value = ndcg_of(row) or 0.0
        gate = (row.metrics.get("gate") or {}).get("ndcg@10") or {}
        interval = gate.get("interval")
        low = high = None
        if interval:
            low, high = (value + end - gate["difference"] for end in interval)
        values.append((value, low, high))
    ends = [end for triple in values for end in triple if end is not None]
    bottom, top = min(ends), max(ends)
    room = max(0.15 * (top - bottom), 0.02 * top, 0.001)
    bottom, top = max(0.0, bottom - room), top + room

    def y(value: float) -> float:
        return round(TOP + (top - value) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    step = (WIDTH - LEFT - RIGHT) / max(len(shown), 2)
    points = []
    for n, (row, (value, low, high)) in enumerate(zip(shown, values, strict=True)):
        kind = "rejected" if row.status == "rejected" else "published"
        points.append(
            Point(
                row.version,
                round(LEFT + (n + 0.5) * step, 1),
                y(value),
                None if low is None else y(low),
                None if high is None else y(high),
                kind,
                row.version == activation.version,
                f"{row.version}: NDCG@10 {value:.4f}, {verdict(row)}, {row.status}",
            )
        )
    places = {point.version: point for point in points}
    marks = [
        (places[change.version].x, change)
        for change in changes
        if change.version in places and change.reason in ("rolled_back", "returned")
    ]
    ticks = [bottom + (top - bottom) * n / 4 for n in range(5)]
    return {
        "points": points,
        "line": " ".join(f"{p.x},{p.y}" for p in points if p.kind == "published"),
        "ticks": [(y(tick), f"{tick:.3f}") for tick in ticks],
        "marks": marks,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "base": HEIGHT - BOTTOM,
    }


def _compared(row: ModelRow) -> list[dict[str, Any]]:
    """The figures of the version, the baselines and popularity, over the whole catalogue."""
    metrics = row.metrics
    named = [(str(metrics.get("recipe", row.kind)), metrics.get("full"), True)]
    names = {"als": "ALS", "next-item": "next item, linear"}
    for name, figures in (metrics.get("baselines") or {}).items():
        named.append((names.get(name, name), figures, False))
    named.append(("popularity list", metrics.get("popularity_full"), False))
    shown = [(name, figures, own) for name, figures, own in named if figures]
    best = max((figures["ndcg@10"] for _, figures, _ in shown), default=0.0) or 1.0
    return [
        {"name": name, "figures": figures, "own": own, "width": 100 * figures["ndcg@10"] / best}
        for name, figures, own in shown
    ]


def _interval(row: ModelRow) -> dict[str, float] | None:
    """The gate's interval against its margin, in hundredths of the drawing's width."""
    compared = (row.metrics.get("gate") or {}).get("ndcg@10") or {}
    if not compared.get("interval"):
        return None
    low, high = compared["interval"]
    margin, difference = -abs(compared["margin"]), compared["difference"]
    reach = 1.15 * max(abs(low), abs(high), abs(margin), 1e-6)

    def x(value: float) -> float:
        return float(round(50 + 50 * value / reach, 2))

    return {
        "low": x(low),
        "width": round(x(high) - x(low), 2),
        "difference": x(difference),
        "margin": x(margin),
    }


def _reliability(row: ModelRow) -> list[dict[str, Any]]:
    """The points of the reliability diagram: probabilities of 0.5 to 1 in a square of side 100."""
    bins = row.metrics.get("reliability") or []
    return [
        {
            "x": round(200 * (b["probability"] - 0.5), 1),
            "y": round(100 - 200 * (max(b["share"], 0.5) - 0.5), 1),
            "title": f"predicted {b['probability']:.0%}, right {b['share']:.0%}, "
            f"{b['pairs']:,} pairs",
        }
        for b in bins
    ]
