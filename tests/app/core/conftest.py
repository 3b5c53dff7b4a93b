"""Applications with and without a key, and a check of error responses."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.settings import load_settings
from app.main import create_app

KEY = "a key of more than 16 characters"


@pytest.fixture
def data_dir(tmp_path: Path, sqlite_template: Path) -> Path:
    """A data folder with a migrated database: migrations take longer than most tests."""
    shutil.copy(sqlite_template, tmp_path / "ncr.db")
    return tmp_path


@pytest.fixture
async def keyed(data_dir: Path) -> AsyncIterator[FastAPI]:
    """An application with a key."""
    app = create_app(load_settings(data_dir=data_dir, admin_key=KEY, max_body_bytes=2000))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def open_app(data_dir: Path) -> AsyncIterator[FastAPI]:
    """An application without one."""
    app = create_app(load_settings(data_dir=data_dir, max_body_bytes=2000))

    @app.get("/fail")
    async def fail() -> None:
        raise RuntimeError("a secret")

    async with app.router.lifespan_context(app):
        yield app


async def raw_request(
    app: FastAPI, messages: list[dict[str, Any]] | None = None, **scope: Any
) -> tuple[int, bytes]:
    """A request as a server would pass it on, past what the client library repairs."""
    sent: list[Any] = []
    received = iter(messages or [{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    usual: dict[str, Any] = {"type": "http", "method": "GET", "query_string": b"", "root_path": ""}
    usual |= {"scheme": "http", "http_version": "1.1", "headers": [(b"host", b"127.0.0.1:8000")]}
    usual |= {"server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1)}
    await app(usual | scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def check_problem(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check an error response; returns its body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:ncr:error:{code}"
    assert (body["status"], body["code"]) == (status, code)
    assert body["request_id"] == response.headers["x-request-id"]
    assert isinstance(body["title"], str)
    assert isinstance(body["detail"], str)
    return body
