"""What monitoring asks for: `/health/live`, `/health/ready` and `/metrics`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Scope

from app.core.access import Role, access
from app.core.cache import SingleFlight
from app.core.errors import Unavailable, problem_responses
from app.core.logging import get_logger
from app.core.requests import json_response

log = get_logger(__name__)

REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REFRESH_SECONDS = 1.0
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

router = APIRouter(tags=["health"])


Check = Callable[[], Awaitable[str | None]]
"""Returns the reason why the service is not ready, or None."""

CHECK_SECONDS = 2.0
MAX_READINESS_AGE_SECONDS = 1.0


class Readiness:
    """The readiness checks of all features; `draining` overrides them.

    Anyone may ask, without a key and at any rate: all share what the checks said within
    ``MAX_READINESS_AGE_SECONDS``.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._runs: SingleFlight[None, dict[str, str]] = SingleFlight()
        self._problems: dict[str, str] = {}
        self._checked_at = -math.inf
        self.draining = False
        self.warnings: list[str] = []
        """What operators should know of, though the service is ready."""

    def add(self, name: str, check: Check) -> None:
        """Add the check of a feature."""
        self._checks[name] = check
        self._checked_at = -math.inf

    async def problems(self) -> dict[str, str]:
        """The reasons why the service is not ready, by the names of the checks."""
        if self.draining:
            return {"service": "stopping"}
        if time.monotonic() - self._checked_at <= MAX_READINESS_AGE_SECONDS:
            return self._problems
        return await self._runs.run(None, self._check)

    async def _check(self) -> dict[str, str]:
        started = time.monotonic()
        problems = {}
        for name, check in self._checks.items():
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    problem = await check()
            except Exception as error:
                # The reason may hold an address or a user name: it belongs in the log.
                reason = str(error).partition("\n")[0] or type(error).__name__
                log.warning("not ready", check=name, error=reason)
                problem = "cannot be reached"
            if problem is not None:
                problems[name] = problem
        self._problems, self._checked_at = problems, started
        return problems


@router.get("/health/live", summary="Liveness of the process", response_model=None)
@access(None)
async def live() -> Response:
    """200 as long as the process can respond."""
    return json_response({"status": "ok"})


@router.get(
    "/health/ready",
    summary="Readiness for requests",
    response_model=None,
    responses=problem_responses(503),
)
@access(None)
async def ready(request: Request) -> Response:
    """503 while the server starts or stops, and while a dependency is unavailable."""
    readiness: Readiness = request.app.state.readiness
    problems = await readiness.problems()
    if problems:
        detail = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise Unavailable(detail, code="not_ready", checks=problems)
    body: dict[str, Any] = {"status": "ready"}
    if readiness.warnings:
        body["warnings"] = readiness.warnings
    return json_response(body)


def new_registry() -> CollectorRegistry:
    """A registry for one application: nothing is registered on import."""
    return CollectorRegistry()


class HttpMetrics:
    """Counts of requests by route and status, and the durations of responses."""

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
        # Looking up the child of some labels takes longer than counting.
        self._children: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a response. Labels are routes, never paths, which contain ids of users."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = getattr(scope.get("route"), "path", None) or "none"
        children = self._children.get((method, route, status))
        if children is None:
            children = self._children[method, route, status] = (
                self._requests.labels(method, route, status),
                self._seconds.labels(route),
            )
        children[0].inc()
        children[1].observe(seconds)


class OnScrape(Collector):
    """Metrics that are read at each scrape, some of them from the database."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refreshes: list[Callable[[], Awaitable[None]]] = []
        self._read: list[Callable[[], Iterable[Metric]]] = []
        registry.register(self)

    def add(
        self,
        read: Callable[[], Iterable[Metric]],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Add a source of metrics.

        Args:
            read: returns the metrics.
            refresh: called before, to read from the database.
        """
        self._read.append(read)
        if refresh is not None:
            self._refreshes.append(refresh)

    async def refresh(self) -> None:
        """Call the refresh of every source. A source whose refresh fails keeps its last values."""
        for refresh in self._refreshes:
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    await refresh()
            except Exception as error:
                log.warning("metrics not read", error=str(error).partition("\n")[0])

    def collect(self) -> list[Metric]:
        """The metrics of all sources."""
        return [metric for read in self._read for metric in read()]


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
@access(Role.METRICS)
async def metrics(request: Request) -> Response:
    """Metrics of this process since its start, without ids of users or items."""
    await request.app.state.on_scrape.refresh()
    registry: CollectorRegistry = request.app.state.metrics
    return Response(text_of(registry), media_type=CONTENT_TYPE_LATEST)
