"""Middleware: request ids, limits on bodies, headers, CORS, and log lines of requests."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import httpx2
import pytest
import structlog
from fastapi import FastAPI

from app.core.access import Role
from app.core.logging import configure_logging, get_logger
from app.core.settings import Settings, load_settings
from app.main import create_app
from tests.app.conftest import client_of
from tests.app.core.conftest import check_problem

pytestmark = pytest.mark.anyio

SECRET = "a-secret-key-of-enough-characters"


async def test_request_ids_are_taken_from_valid_headers(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        given = await client.get("/health/live", headers={"X-Request-ID": "abc-1_2"})
        assert given.headers["x-request-id"] == "abc-1_2"
        for bad in ("", "a b", "x" * 65, "a;b"):
            answer = await client.get("/health/live", headers={"X-Request-ID": bad})
            assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


async def test_large_bodies_are_413_and_other_media_types_415(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        large = b'"' + b"x" * 3000 + b'"'
        json_type = {"content-type": "application/json"}

        async def stream() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield large

        for content in (large, stream()):
            response = await client.post("/events", content=content, headers=json_type)
            check_problem(response, 413, "payload_too_large")
        for headers in (
            {},
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {**json_type, "content-encoding": "gzip"},
        ):
            response = await client.post("/events", content=b"[]", headers=headers)
            check_problem(response, 415, "unsupported_media_type")
        charset = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await client.post("/events", content=b"[]", headers=charset)).status_code == 200


async def test_ndjson_is_refused_on_routes_that_are_not_streamed(
    client: httpx2.AsyncClient,
) -> None:
    """It is not bound by the limit on bodies, so no other route may take it."""
    headers = {"Content-Type": "application/x-ndjson"}
    for path in ("/items", "/admin/train"):
        response = await client.post(path, content=b"{}\n", headers=headers)
        assert response.status_code == 415
    assert (await client.post("/events", content=b"{}\n", headers=headers)).status_code == 200


async def test_security_headers_are_on_every_response(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for path in ("/recommend/u", "/nothing", "/docs", "/health/live", "/recommend/u?n=0"):
            headers = (await client.get(path)).headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
            assert "Server" not in headers


async def test_cors_origins_are_allowed_by_setting_only(settings: Settings) -> None:
    shop = {"Origin": "https://shop.example"}
    ask = shop | {"Access-Control-Request-Method": "POST"}
    plain = create_app(settings)
    async with plain.router.lifespan_context(plain), client_of(plain) as client:
        assert (
            "Access-Control-Allow-Origin" not in (await client.get("/items", headers=shop)).headers
        )
        assert (await client.options("/events", headers=ask)).status_code == 405
    wanted = load_settings(
        **settings.model_dump()
        | {"admin_key": SECRET, "cors_origins": "https://shop.example, https://b.example"}
    )
    app = create_app(wanted)
    async with app.router.lifespan_context(app), client_of(app) as client:
        allowed = await client.options("/events", headers=ask)  # a browser sends no key with it
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://shop.example"
        refused = await client.options("/events", headers=ask | {"Origin": "https://c.example"})
        assert "Access-Control-Allow-Origin" not in refused.headers
        refusal = await client.get("/items", headers=shop)
        assert refusal.status_code == 401
        assert refusal.headers["Access-Control-Allow-Origin"] == "https://shop.example"


async def test_log_lines_have_the_request_id_and_no_secret(
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = load_settings(
        **settings.model_dump() | {"admin_key": SECRET, "log_format": "json", "log_level": "debug"}
    )
    app = create_app(wanted)
    async with app.router.lifespan_context(app), client_of(app) as client:
        configure_logging(wanted.log_level, wanted.log_format)

        async def fail(*_: object) -> None:
            get_logger("test").warning("on the way")
            raise RuntimeError("broken inside")

        monkeypatch.setattr(app.state.services.catalog, "get", fail)
        headers = {"X-API-Key": SECRET, "X-Request-ID": "r-42"}
        answer = await client.get("/items/x", headers=headers)
        await client.get("/items/x", headers={"X-API-Key": "wrong-" + SECRET})
    assert answer.status_code == 500
    assert "broken inside" not in answer.text
    assert answer.json()["request_id"] == "r-42"
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    mine = [line for line in lines if line.get("request_id") == "r-42"]
    of_mine = [line["event"] for line in mine if "HTTP Request" not in line["event"]]
    assert of_mine == ["on the way", "request failed", "request"]
    assert SECRET not in text


async def test_the_log_says_which_key_wrote_and_which_administered(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        configure_logging("info", "json")
        services = app.state.services
        shop, shop_key = await services.keys.create("shop", [Role.READ, Role.INGEST])
        boss, boss_key = await services.keys.create("boss", [Role.ADMIN])
        event = {"user": "ann", "item": "tea"}
        for method, path, key, body in (
            ("POST", "/events", shop_key, event),
            ("GET", "/recommend/ann", shop_key, None),
            ("POST", "/rerank", shop_key, {"user": "ann", "items": ["tea"]}),
            ("GET", "/users/ann/events", shop_key, None),
            ("DELETE", "/users/ann", shop_key, None),
            ("GET", "/admin/jobs", boss_key, None),
            ("DELETE", "/users/ann", boss_key, None),
            ("POST", "/events", "no key", event),
            ("POST", "/admin/models/rollback", boss_key, None),
        ):
            await client.request(method, path, json=body, headers={"X-API-Key": key})
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    said = [
        (line["key_id"], line["method"], line["path"], line["status"], line["level"])
        for line in lines
        if line["event"] == "request"
    ]
    assert said == [
        (shop.key_id, "POST", "/events", 200, "info"),
        (shop.key_id, "DELETE", "/users/ann", 403, "info"),
        (boss.key_id, "GET", "/admin/jobs", 200, "info"),
        (boss.key_id, "DELETE", "/users/ann", 204, "info"),
        (boss.key_id, "POST", "/admin/models/rollback", 409, "info"),
    ]
    assert shop_key not in text
    assert boss_key not in text


async def test_what_an_audited_request_logs_on_its_way_has_the_keys_id(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    seen = []

    @app.post("/admin/seen")
    @app.get("/seen")
    async def note() -> None:
        seen.append(structlog.contextvars.get_contextvars().get("key_id"))

    await client.post("/admin/seen")
    await client.get("/seen")  # not of the request before
    assert seen == ["local", None]
