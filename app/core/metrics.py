"""`/metrics`: what the features count and time, in Prometheus's text format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

router = APIRouter(tags=["health"])


def new_registry() -> CollectorRegistry:
    """One an application: nothing is registered on import, and tests do not share figures."""
    return CollectorRegistry()


@router.get("/metrics", summary="Figures for Prometheus", response_model=None)
async def metrics(request: Request) -> Response:
    """Of this process since it started; no ids of users or items are in them."""
    registry: CollectorRegistry = request.app.state.metrics
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
