"""`/metrics`: what the features count and time, in Prometheus's text format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Scope

from app.core.logging import get_logger

log = get_logger(__name__)

REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REFRESH_SECONDS = 1.0
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

router = APIRouter(tags=["health"])


def new_registry() -> CollectorRegistry:
    """One an application: nothing is registered on import, and tests do not share figures."""
    return CollectorRegistry()


class HttpMetrics:
    """Requests by route and status, and how long answers took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "ncr_http_requests",
            "Requests that were answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "ncr_http_request_seconds",
            "From a request's first line to the end of its answer.",
            ["route"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "ncr_http_refused",
            "Requests that were turned away for their key, its role or its rate.",
            ["code"],
            registry=registry,
        )
        # To find the child of some labels takes longer than to count.
        self._known: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts an answer. Labels are routes, never paths: ids of users are in those."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = getattr(scope.get("route"), "path", None) or "none"
        both = self._known.get((method, route, status))
        if both is None:
            both = self._known[method, route, status] = (
                self._requests.labels(method, route, status),
                self._seconds.labels(route),
            )
        both[0].inc()
        both[1].observe(seconds)


class OnScrape(Collector):
    """Figures that are read when somebody looks, some of them from the database first."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refreshes: list[Callable[[], Awaitable[None]]] = []
        self._read: list[Callable[[], Iterable[Metric]]] = []
        registry.register(self)

    def add(
        self,
        read: Callable[[], Iterable[Metric]],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._read.append(read)
        if refresh is not None:
            self._refreshes.append(refresh)

    async def refresh(self) -> None:
        """Brings up to date what takes waiting. What cannot be read stays as it was."""
        for refresh in self._refreshes:
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await refresh()
            except Exception as error:
                log.warning("figures not read", error=str(error).partition("\n")[0])

    def collect(self) -> list[Metric]:
        return [metric for read in self._read for metric in read()]


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Of this process since it started; no ids of users or items are in them."""
    await request.app.state.on_scrape.refresh()
    registry: CollectorRegistry = request.app.state.metrics
    return Response(text_of(registry), media_type=CONTENT_TYPE_LATEST)
