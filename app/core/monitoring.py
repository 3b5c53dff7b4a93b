"""Monitoring: the routes `/health/live`, `/health/ready` and `/metrics`, and traces.

Traces use OpenTelemetry and need the setting `NCR_OTLP_ENDPOINT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import __version__
from app.core.access import ACCESS_KEY, Role, access
from app.core.cache import SingleFlight
from app.core.errors import REQUEST_ID_KEY, SettingsError, Unavailable, problem_responses
from app.core.logging import get_logger
from app.core.requests import json_response

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


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

    Clients may ask without a key and as often as they like. Requests within
    ``MAX_READINESS_AGE_SECONDS`` share the results of one run of the checks.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._runs: SingleFlight[None, dict[str, str]] = SingleFlight()
        self._problems: dict[str, str] = {}
        self._checked_at = -math.inf
        self.draining = False
        self.warnings: list[str] = []
        """Warnings for operators, which leave the service ready."""

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


@router.get("/health/live", summary="Check the liveness of the process", response_model=None)
@access(None)
async def live() -> Response:
    """Returns 200 while the process can respond."""
    return json_response({"status": "ok"})


@router.get(
    "/health/ready",
    summary="Check the readiness for requests",
    response_model=None,
    responses=problem_responses(503),
)
@access(None)
async def ready(request: Request) -> Response:
    """Returns 503 while the server starts or stops, or while a dependency is unavailable."""
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
    """A registry of metrics for one application. No import registers a metric."""
    return CollectorRegistry()


class HttpMetrics:
    """Counts of requests by route and status, and the durations of responses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "ncr_http_requests",
            "Completed requests.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "ncr_http_request_seconds",
            "The time from the first line of a request to the end of its response, in seconds.",
            ["route"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "ncr_http_refused",
            "Requests refused because of their key, role or rate.",
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

    def answered(self, route: str, status: int | None = None) -> int:
        """The number of answers of a route since the process began, of one status or of all."""
        return round(
            sum(
                sample.value
                for sample in next(iter(self._requests.collect())).samples
                if sample.name.endswith("_total")
                and sample.labels["route"] == route
                and status in (None, int(sample.labels["status"]))
            )
        )

    def quantile(self, route: str, share: float) -> float | None:
        """The upper end, in seconds, of the bucket with this quantile of a route's durations.

        None without answers, and for a quantile beyond the largest bucket.
        """
        buckets = [
            (float(sample.labels["le"]), sample.value)
            for sample in next(iter(self._seconds.collect())).samples
            if sample.name.endswith("_bucket") and sample.labels["route"] == route
        ]
        total = max((count for _, count in buckets), default=0)
        end = next((end for end, count in buckets if total and count >= share * total), math.inf)
        return None if math.isinf(end) else end


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
            refresh: called before ``read``, to read from the database.
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
    summary="Get the metrics for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
@access(Role.METRICS)
async def metrics(request: Request) -> Response:
    """Returns the metrics of this process since its start, without ids of users or items."""
    await request.app.state.on_scrape.refresh()
    registry: CollectorRegistry = request.app.state.metrics
    return Response(text_of(registry), media_type=CONTENT_TYPE_LATEST)


def tracer_provider(endpoint: str) -> TracerProvider:
    """A provider that sends spans in batches, in a thread of its own.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise SettingsError(
            "NCR_OTLP_ENDPOINT needs OpenTelemetry: pip install neural-collaborative-ranking[otel]"
        ) from None
    resource = Resource.create({"service.name": "ncr", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=5)))
    return provider


SHUTDOWN_SECONDS = 2.0


async def shut_down(provider: TracerProvider) -> None:
    """Send the remaining spans, for 2 seconds at most: the collector may be unavailable."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        provider.shutdown()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    # Not in the pool of the loop, which would wait for it at its end.
    threading.Thread(target=work, daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), SHUTDOWN_SECONDS)


class Tracing:
    """Middleware that makes a span for each request, within the trace of the client's headers.

    Attributes follow the semantic conventions for HTTP, but without paths, which contain ids of
    users.
    """

    def __init__(self, app: ASGIApp, *, provider: TracerProvider) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self.app = app
        self._tracer = provider.get_tracer("ncr")
        self._extract = extract
        self._server = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within a span."""
        if scope["type"] != "http" or scope[ACCESS_KEY].role is None:
            await self.app(scope, receive, send)
            return
        carrier: dict[str, Any] = {
            name: value.decode("latin-1")
            for key, value in scope["headers"]
            if (name := key.decode("latin-1")) in ("traceparent", "tracestate")
        }
        method = scope["method"]
        with self._tracer.start_as_current_span(
            method,
            context=self._extract(carrier),
            kind=self._server,
            # The text of an exception may contain values that a client sent.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            status = 0

            async def send_with_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await self.app(scope, receive, send_with_status)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
                span.set_attribute("http.request.method", method)
                span.set_attribute("http.response.status_code", status)
                span.set_attribute("ncr.request_id", scope.get(REQUEST_ID_KEY, ""))
                if status >= 500 or not status:
                    span.set_status(self._failed)
