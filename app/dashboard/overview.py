"""The first page: the state of the service, the served version, lists, and the last training."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.access import Role, access
from app.core.ids import HOUR_MS, hour_now
from app.core.monitoring import HttpMetrics
from app.dashboard.rendering import (
    ROOT,
    PageRoute,
    caller_has,
    kept_figures,
    lists_of,
    render,
    services_of,
)

router = APIRouter(route_class=PageRoute, include_in_schema=False)

HOURS = 48
LIST_ROUTE = "/recommend/{user}"


@router.get(ROOT)
@access(Role.METRICS, page=True)
async def overview(request: Request) -> Response:
    """Health, the served version, lists and click-through by hour, and the last training."""
    services = services_of(request)
    problems = await request.app.state.readiness.problems()
    row = await services.models.serving()
    activation = await services.models.activation()
    last_seq = await services.events.last_seq()
    catalogue = await services.catalog.catalogue()
    now = hour_now()
    served = await kept_figures(request).get(
        ("served", now),
        lambda: services.trials.click_through.of_all_by_hour(now - HOURS + 1, now + 1),
    )
    http: HttpMetrics = request.app.state.http_metrics
    jobs, _ = await services.jobs.page(None, 20)
    trainings = [job for job in jobs if job.kind == "train"]
    lists = sum(counts.lists for counts in served.values())
    clicked = sum(counts.clicked for counts in served.values())
    example = await services.events.recent_users(1)
    return render(
        request,
        "overview.html",
        problems=problems,
        warnings=request.app.state.readiness.warnings,
        row=row,
        activation=activation,
        refused=lists_of(request).models.refused,
        last_seq=last_seq,
        users=await services.events.count_users(),
        items=int(catalogue.visible.sum()),
        lists=lists,
        clicked=clicked,
        chart=_chart(served, now) if lists else None,
        p99=http.quantile(LIST_ROUTE, 0.99),
        answered=http.answered(LIST_ROUTE),
        overloaded=http.answered(LIST_ROUTE, 503),
        training=next(iter(trainings), None) if caller_has(request, Role.ADMIN) else None,
        example=example[0][0] if example else None,
    )


def _chart(served: dict[int, Any], now: int) -> dict[str, Any]:
    hours = range(now - HOURS + 1, now + 1)
    rows = [served.get(hour) for hour in hours]
    return {
        "x": [hour * HOUR_MS // 1000 for hour in hours],
        "time": True,
        "series": [
            {"label": "lists", "values": [0 if row is None else row.lists for row in rows],
             "bars": True},
            {
                "label": "clicked, %",
                "axis": "right",
                "values": [
                    None if row is None or not row.lists else 100 * row.clicked / row.lists
                    for row in rows
                ],
            },
        ],
    }  # fmt: skip
