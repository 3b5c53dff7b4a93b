"""Traces by OpenTelemetry, where a setting says where to send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import __version__
from app.core.errors import REQUEST_ID_KEY, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_provider(endpoint: str) -> TracerProvider:
    """Sends spans in batches, from a thread of its own. Raises SettingsError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise SettingsError(
            "NCR_OTLP_ENDPOINT needs OpenTelemetry: pip install neural-collaborative-ranking[otel]"
        ) from None
    about = Resource.create({"service.name": "ncr", "service.version": __version__})
    provider = TracerProvider(resource=about)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=5)))
    return provider


class Tracing:
    """Middleware: a span for each request, within the trace that the client's headers name.

    Attributes are those of the semantic conventions for HTTP; a path is none of them, because ids
    of users are in paths.
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
        if scope["type"] != "http" or scope["path"].startswith("/health/"):
            await self.app(scope, receive, send)
            return
        carrier: dict[str, Any] = {
            name: value.decode("latin-1")
            for key, value in scope["headers"]
            if (name := key.decode("latin-1")) in ("traceparent", "tracestate")
        }
        method = scope["method"]
        with self._tracer.start_as_current_span(
            method, context=self._extract(carrier), kind=self._server
        ) as span:
            status = 0

            async def send_and_see(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await self.app(scope, receive, send_and_see)
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
