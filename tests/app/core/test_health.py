"""Liveness and readiness."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import FastAPI

from tests.app.core.conftest import check_problem

pytestmark = pytest.mark.anyio


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
