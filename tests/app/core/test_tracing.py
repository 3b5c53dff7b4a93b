"""Traces, by a collector that listens."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from app.core.settings import Settings
from app.main import create_app
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that came in."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()


async def test_a_request_is_a_span_of_the_clients_trace(
    settings: Settings, collector: tuple[str, list[bytes]]
) -> None:
    address, bodies = collector
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    app = create_app(settings.model_copy(update={"otlp_endpoint": address}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-ID": "r-1"}
        assert (await client.get("/recommend/ann", headers=headers)).status_code == 200
        assert (await client.get("/items/none")).status_code == 404
        assert (await client.post("/items", content=b"x")).status_code == 415
        assert (await client.get("/health/live")).status_code == 200
    spans = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == [
        "GET /items/{item}", "GET /recommend/{user}", "POST",
    ]  # fmt: skip
    (refused,) = (span for span in spans if span.name == "POST")
    assert not refused.events
    assert {a.key: a.value.int_value for a in refused.attributes}[
        "http.response.status_code"
    ] == 415
    (mine,) = (span for span in spans if "recommend" in span.name)
    assert mine.trace_id.hex() == trace
    assert mine.parent_span_id.hex() == parent
    values = {a.key: a.value.string_value or a.value.int_value for a in mine.attributes}
    assert values["http.route"] == "/recommend/{user}"
    assert values["http.response.status_code"] == 200
    assert values["ncr.request_id"] == "r-1"
    assert b"ann" not in b"".join(bodies)


@pytest.mark.slow
async def test_an_unreachable_collector_does_not_affect_requests(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"otlp_endpoint": "http://127.0.0.1:1/v1/traces"}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert (await client.get("/recommend/ann")).status_code == 200
