"""Readiness and metrics, and that the dashboard and the alerts name what there is."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from app.core import monitoring
from app.core.settings import Settings
from app.main import create_app
from app.wiring import build_services
from tests.app.conftest import add_small_data, client_of, publish_model, until
from tests.app.core.conftest import check_problem
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).parents[3] / "deploy"
ROUTE = "/recommend/{user}"


async def scrape(client: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.slow
async def test_requests_events_and_models_are_counted(
    settings: Settings, redis_url: str, redis_prefix: str
) -> None:
    more = {"redis_url": redis_url, "redis_prefix": redis_prefix}
    settings = settings.model_copy(update=more)
    services = await build_services(settings)
    await add_small_data(services)
    version = await publish_model(services)
    await services.jobs.submit_training(_params())
    trained = await services.events.last_seq()
    await services.close()

    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await until(lambda: app.state.services.redis.available)
        for _ in range(3):
            await client.get("/recommend/user-1?n=5")
        await client.get("/recommend/user-1?n=5000")
        await client.get("/nothing/here")
        rows = [{"event_id": "a", "user": "u", "item": "i"}, {"user": "u"}]
        await client.post("/events", json=rows)
        await client.post("/events", json=rows[:1])
        found = await scrape(client)
        requests = "ncr_http_requests_total"
        assert found[key(requests, method="GET", route=ROUTE, status="200")] == 3
        assert found[key(requests, method="GET", route=ROUTE, status="422")] == 1
        assert found[key(requests, method="GET", route="none", status="404")] == 1
        assert found[key("ncr_http_request_seconds_count", route=ROUTE)] == 4
        lists = {"cache": "lists", "tier": "process"}
        assert found[key("ncr_cache_requests_total", result="hit", **lists)] == 2
        assert found[key("ncr_cache_requests_total", result="miss", **lists)] == 1
        assert found[key("ncr_rank_batch_size_count")] == 1
        for verdict in ("accepted", "duplicate", "rejected"):
            assert found[key("ncr_events_total", verdict=verdict)] == 1
        assert found[key("ncr_event_group_rows_count")] == 2
        assert found[key("ncr_event_group_rows_sum")] == 2
        assert found[key("ncr_events_waiting")] == 0
        assert found[key("ncr_jobs", kind="train", status="queued")] == 1
        assert found[key("ncr_job_waiting_seconds")] > 0
        assert found[key("ncr_model_info", version=version, model="nbpr", factors="4")] == 1
        assert found[key("ncr_model_events_behind")] == 1
        assert await app.state.services.events.last_seq() == trained + 1
        assert 0 < found[key("ncr_model_evaluation", protocol="sampled", metric="hr@10")] <= 1
        assert found[key("ncr_model_refused")] == 0
        assert found[key("ncr_redis_available")] == 1

        # Every figure that the dashboard and the alerts ask for is one of these.
        asked = _asked_for()
        assert len(asked) > 25
        shown = {name for name, _ in found}
        there = shown | {f"{name}_total" for name in shown}
        # Counters with labels that nothing has happened to have no samples yet.
        there |= {"ncr_http_refused_total", "ncr_rank_device_fallbacks_total"}
        assert asked - there == set()


async def test_metrics_are_served_while_the_database_is_down(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:

        async def away(*_: Any) -> None:
            raise OperationalError("SELECT", {}, OSError("away"))

        monkeypatch.setattr(app.state.services.database, "fetch", away)
        monkeypatch.setattr("app.keys.service.REFRESH_SECONDS", 0.0)
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert "ncr_events_waiting" in answer.text


def _params() -> Any:
    from app.jobs.schemas import TrainParams

    return TrainParams()


def _asked_for() -> set[str]:
    text = (DEPLOY / "grafana" / "dashboard.json").read_text()
    expressions = [t["expr"] for p in json.loads(text)["panels"] for t in p.get("targets", ())]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return {name for text in expressions for name in re.findall(r"ncr_[a-z_]+", text)}


def test_jobs_that_are_deleted_hide_no_failure_from_the_alerts() -> None:
    """Counts of jobs fall: an alert looks for a rise within minutes, not for that of an hour."""
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    expressions = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    for status in ("failed", "rejected"):
        rise = f'delta(ncr_jobs{{status="{status}"}}[5m])'
        assert f"sum(max_over_time({rise}[1h:1m])) > 0" in expressions


async def test_readiness_is_checked_once_for_all_who_ask_within_a_second(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0
    go = asyncio.Event()

    async def count() -> str | None:
        nonlocal checks
        checks += 1
        await go.wait()
        return "loading" if checks == 1 else None

    app.state.readiness.add("slow", count)
    asked = [asyncio.create_task(client.get("/health/ready")) for _ in range(20)]
    await until(lambda: checks == 1)
    go.set()
    assert {response.status_code for response in await asyncio.gather(*asked)} == {503}
    assert (await client.get("/health/ready")).status_code == 503
    assert checks == 1
    monkeypatch.setattr(monitoring, "MAX_READINESS_AGE_SECONDS", 0.0)
    assert (await client.get("/health/ready")).status_code == 200
    assert checks == 2


@ON_SQLITE
async def test_readiness_warns_of_a_sqlite_with_a_bug(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, warned in {(3, 51, 2): True, (3, 51, 3): False}.items():
        monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
        app = create_app(settings)
        async with app.router.lifespan_context(app), client_of(app) as client:
            body = (await client.get("/health/ready")).json()
        assert body["status"] == "ready"
        assert ["3.51.3" in warning for warning in body.get("warnings", [])] == [True] * warned


async def test_readiness_reports_failed_checks_and_draining_without_secrets(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    assert (await client.get("/health/live")).json() == {"status": "ok"}
    assert (await client.get("/health/ready")).status_code == 200

    async def loading() -> str | None:
        return "the model is loading"

    app.state.readiness.add("model", loading)
    body = check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert body["checks"] == {"model": "the model is loading"}

    async def broken() -> str | None:
        raise ConnectionError("password=hunter22")

    app.state.readiness.add("model", broken)
    body = check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert "hunter22" not in str(body)
    app.state.readiness.draining = True
    body = check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert body["checks"] == {"service": "stopping"}
    assert (await client.get("/health/live")).status_code == 200


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


@pytest.mark.slow
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
