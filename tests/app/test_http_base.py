"""What all routes share: errors, keys, limits, ids in paths, documentation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError

from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio

KEY = "a key of more than 16 characters"


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[FastAPI]:
    """An application with a key."""
    app = create_app(load_settings(data_dir=tmp_path, admin_key=KEY, max_body_bytes=2000))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def open_app(tmp_path: Path) -> AsyncIterator[FastAPI]:
    """An application without one."""
    app = create_app(load_settings(data_dir=tmp_path, max_body_bytes=2000))

    @app.get("/fail")
    async def fail() -> None:
        raise RuntimeError("a secret")

    async with app.router.lifespan_context(app):
        yield app


def _check_problem(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:ncr:error:{code}"
    assert (body["status"], body["code"]) == (status, code)
    assert body["request_id"] == response.headers["x-request-id"]
    assert isinstance(body["title"], str)
    assert isinstance(body["detail"], str)
    return body


async def test_every_error_has_one_form(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        _check_problem(await client.get("/nowhere"), 404, "not_found")
        _check_problem(await client.get("/items/"), 404, "not_found")
        _check_problem(await client.delete("/events"), 405, "method_not_allowed")
        _check_problem(await client.get("/items/absent"), 404, "unknown_item")
        body = _check_problem(
            await client.get("/items?n=x&cursor=" + "y" * 999), 422, "invalid_request"
        )
        assert [error["loc"] for error in body["errors"]] == [["query", "n"], ["query", "cursor"]]
        assert len(str(body)) < 1000
        body = _check_problem(await client.get("/fail"), 500, "internal_error")
        assert "secret" not in str(body)


async def test_request_ids(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        given = await client.get("/health/live", headers={"X-Request-ID": "abc-1_2"})
        assert given.headers["x-request-id"] == "abc-1_2"
        for bad in ("", "a b", "x" * 65, "a;b"):
            answer = await client.get("/health/live", headers={"X-Request-ID": bad})
            assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


async def test_bodies_have_limits_and_types(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        large = b'"' + b"x" * 3000 + b'"'
        json_type = {"content-type": "application/json"}

        async def stream() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield large

        for content in (large, stream()):
            response = await client.post("/events", content=content, headers=json_type)
            _check_problem(response, 413, "payload_too_large")
        for headers in (
            {},
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {**json_type, "content-encoding": "gzip"},
        ):
            response = await client.post("/events", content=b"[]", headers=headers)
            _check_problem(response, 415, "unsupported_media_type")
        charset = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await client.post("/events", content=b"[]", headers=charset)).status_code == 200


IDS = [
    "plain",
    "a/b",
    "/",
    "a b",
    "100%",
    "%2F",
    "..",
    ".",
    "😀/é",
    "?#&=+;",
    "a\tb\n",
    "x" * 256,
    "é" * 128,
    "live",
]


async def test_any_id_is_one_segment(client: httpx2.AsyncClient) -> None:
    for name in IDS:
        encoded = quote(name, safe="").replace(".", "%2E")
        put = await client.put(f"/items/{encoded}", json={"title": "t"})
        assert (put.status_code, put.json()["id"]) == (201, name)
        posted = await client.post("/events", json={"user": name, "item": name, "event_id": name})
        assert posted.json()["accepted"] == 1
        history = await client.get(f"/users/{encoded}/events?n=1")
        assert [event["item"] for event in history.json()["items"]] == [name]
        assert (await client.delete(f"/events/{encoded}")).status_code == 204
    assert len((await client.get("/items?n=1000")).json()["items"]) == len(IDS)


async def test_bad_ids_in_paths(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for bad in (
            "%FF",
            "%C3",
            "%00",
            "a%00b",
            "%ED%A0%80",
            "x" * 257,
            "x" * 10_000,
            "%C3%A9" * 129,
        ):
            _check_problem(await client.get(f"/items/{bad}"), 422, "invalid_id")


async def _raw(app: FastAPI, raw_path: bytes | None, path: str) -> tuple[int, bytes]:
    """A request as a server would pass it on, past what the client library repairs."""
    sent: list[Any] = []
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8000")],
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
    }
    if raw_path is not None:
        scope["raw_path"] = raw_path

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def test_paths_as_odd_clients_send_them(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for name in ("%C3%A9", "a%25b"):
            assert (await client.put(f"/items/{name}", json={})).status_code == 201
    # UTF-8 that is not encoded; a query left in; no raw path at all; a broken escape.
    assert (await _raw(open_app, "/items/é".encode(), "/items/é"))[0] == 200
    assert (await _raw(open_app, b"/items/%C3%A9?n=1", "/items/é"))[0] == 200
    assert (await _raw(open_app, None, "/items/é"))[0] == 200
    assert (await _raw(open_app, None, "/items/a%b"))[0] == 200
    status, body = await _raw(open_app, b"/items/%zz", "/items/%zz")
    assert (status, b"invalid_id" in body) == (422, True)
    assert (await _raw(open_app, b"/items/%", "/items/%"))[0] == 422
    assert (await _raw(open_app, b"*", "*"))[0] == 404


async def test_with_a_key_everything_but_health_needs_it(keyed: FastAPI) -> None:
    async with client_of(keyed) as client:
        for path in ("/items", "/docs", "/openapi.json", "/metrics", "/nowhere", "/health", "/"):
            body = await client.get(path)
            _check_problem(body, 401, "unauthorized")
            assert body.headers["www-authenticate"]
            wrong = await client.get(path, headers={"X-API-Key": KEY[:-1]})
            assert wrong.status_code == 401
        post = await client.post("/events", json={"user": "u", "item": "i"})
        assert post.status_code == 401
        for path in ("/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        # The key says who it is; from which page is then no matter.
        headers = {"Host": "example.com", "Origin": "https://example.com", "X-API-Key": KEY}
        post = await client.post("/events", json={"user": "u", "item": "i"}, headers=headers)
        assert post.status_code == 200


async def test_without_a_key_only_this_machine_is_answered(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for host in ("localhost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"):
            assert (await client.get("/items", headers={"Host": host})).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[::2]", "a@b"):
            response = await client.get("/items", headers={"Host": host})
            _check_problem(response, 403, "forbidden")
        event = {"user": "u", "item": "i"}
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "", "x:["):
            response = await client.post("/events", json=event, headers={"Origin": origin})
            _check_problem(response, 403, "forbidden")
        for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]"):
            response = await client.post("/events", json=event, headers={"Origin": origin})
            assert response.status_code == 200, origin


async def test_the_documentation_needs_no_network(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for page in ("/docs", "/redoc"):
            html = (await client.get(page)).text
            assert not re.findall(r"https?://", html), page
            for url in re.findall(r"""(?:src|href)=["']([^"']+)["']""", html):
                assert (await client.get(url)).status_code == 200, url
        schema = (await client.get("/openapi.json")).json()
        assert {"/events", "/items/{item}", "/users/{user}/events"} <= set(schema["paths"])
        post = schema["paths"]["/events"]["post"]
        assert set(post["requestBody"]["content"]) == {"application/json", "application/x-ndjson"}
        assert "HTTPValidationError" not in str(post)


async def test_health(app: FastAPI, client: httpx2.AsyncClient) -> None:
    assert (await client.get("/health/live")).json() == {"status": "ok"}
    assert (await client.get("/health/ready")).status_code == 200

    async def loading() -> str | None:
        return "the model is loading"

    app.state.readiness.add("model", loading)
    body = _check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert body["checks"] == {"model": "the model is loading"}

    async def broken() -> str | None:
        raise ConnectionError("password=hunter22")

    app.state.readiness.add("model", broken)
    body = _check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert "hunter22" not in str(body)
    app.state.readiness.draining = True
    body = _check_problem(await client.get("/health/ready"), 503, "not_ready")
    assert body["checks"] == {"service": "stopping"}
    assert (await client.get("/health/live")).status_code == 200


async def test_ndjson_is_for_events_only(client: httpx2.AsyncClient) -> None:
    """It is not bound by the limit on bodies, so no other route may take it."""
    headers = {"Content-Type": "application/x-ndjson"}
    for path in ("/items", "/admin/train"):
        response = await client.post(path, content=b"{}\n", headers=headers)
        assert response.status_code == 415
    assert (await client.post("/events", content=b"{}\n", headers=headers)).status_code == 200


async def test_a_database_that_does_not_answer_is_503(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise OperationalError("SELECT secret", {}, Exception("connection to hunter2 refused"))

    monkeypatch.setattr(app.state.services.catalog, "get", away)
    response = await client.get("/items/x")
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["retry-after"]
    assert "hunter2" not in response.text


async def test_a_request_that_is_cut_off_by_a_stop_is_503(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does when its grace is over: it cancels what still runs."""
    running = asyncio.Event()

    async def never(*_: object) -> None:
        running.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(app.state.services.catalog, "get", never)
    request = asyncio.create_task(client.get("/items/x"))
    await running.wait()
    request.cancel()
    response = await request
    assert (response.status_code, response.json()["code"]) == (503, "stopping")
    assert response.headers["retry-after"]
