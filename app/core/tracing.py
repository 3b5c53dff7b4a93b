"""Traces by OpenTelemetry, if the setting `NCR_OTLP_ENDPOINT` is set."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import __version__
from app.core.access import ACCESS_KEY
from app.core.errors import REQUEST_ID_KEY, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


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
