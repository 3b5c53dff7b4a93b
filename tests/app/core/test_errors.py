"""Error responses: problem documents for every kind of error."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from app.core.settings import Settings
from app.main import create_app
from tests.app.conftest import client_of
from tests.app.core.conftest import check_problem, raw_request

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_every_error_is_a_problem_document(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        check_problem(await client.get("/nowhere"), 404, "not_found")
        check_problem(await client.get("/items/"), 404, "not_found")
        check_problem(await client.delete("/events"), 405, "method_not_allowed")
        check_problem(await client.get("/items/absent"), 404, "unknown_item")
        body = check_problem(
            await client.get("/items?n=x&cursor=" + "y" * 999), 422, "invalid_request"
        )
        assert [error["loc"] for error in body["errors"]] == [["query", "n"], ["query", "cursor"]]
        assert len(str(body)) < 1000
        body = check_problem(await client.get("/fail"), 500, "internal_error")
        assert "secret" not in str(body)


async def test_an_unreachable_database_is_503(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise OperationalError("SELECT secret", {}, Exception("connection to hunter2 refused"))

    monkeypatch.setattr(app.state.services.catalog, "get", away)
    response = await client.get("/items/x")
    assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")
    assert response.headers["retry-after"]
    assert "hunter2" not in response.text


async def test_a_request_cancelled_at_shutdown_is_503(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does when its grace is over: it cancels what still runs."""
    running, shop = asyncio.Event(), "https://shop.example"
    app = create_app(settings.model_copy(update={"cors_origins": shop}))

    async def never(*_: object) -> None:
        running.set()
        await asyncio.Event().wait()

    async with app.router.lifespan_context(app), client_of(app) as client:
        monkeypatch.setattr(app.state.services.catalog, "get", never)
        request = asyncio.create_task(client.get("/items/x", headers={"Origin": shop}))
        await running.wait()
        request.cancel()
        response = await request
    assert (response.status_code, response.json()["code"]) == (503, "stopping")
    assert response.headers["retry-after"]
    assert response.headers["access-control-allow-origin"] == shop  # a page may read it


async def test_405_names_all_methods_of_the_path(client: httpx2.AsyncClient) -> None:
    """The framework named those of the first route that has the path."""
    for path, allowed in (
        ("/items", "GET, POST"),
        ("/items/a%2Fb", "DELETE, GET, PATCH, PUT"),
        ("/admin/models/rollback", "POST"),
        ("/admin/models/x", "GET"),
        ("/health/live", "GET"),
    ):
        response = await client.options(path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), path


async def test_an_incomplete_body_is_400_and_not_logged_as_a_failure(app: FastAPI) -> None:
    """Every client that hung up while sending was an exception in the log and a 500."""
    for content_type in (b"application/json", b"application/x-ndjson"):
        messages = [
            {"type": "http.request", "body": b'{"user": ', "more_body": True},
            {"type": "http.disconnect"},
        ]
        headers = [(b"content-type", content_type), (b"content-length", b"100")]
        scope: dict[str, Any] = {"method": "POST", "path": "/events", "raw_path": b"/events"}
        with capture_logs() as logs:
            status, body = await raw_request(app, messages, headers=headers, **scope)
        assert (status, b"incomplete_body" in body) == (400, True)
        assert not [line for line in logs if line["event"] == "request failed"]
