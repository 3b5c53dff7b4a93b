"""Liveness and readiness: `/health/live` and `/health/ready`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.access import access
from app.core.errors import Unavailable, problem_responses
from app.core.logging import get_logger
from app.core.requests import json_response

log = get_logger(__name__)

Check = Callable[[], Awaitable[str | None]]
"""Returns the reason why the service is not ready, or None."""

CHECK_SECONDS = 2.0

router = APIRouter(tags=["health"], prefix="/health")


class Readiness:
    """The readiness checks of all features; `draining` overrides them."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self.draining = False

    def add(self, name: str, check: Check) -> None:
        """Add the check of a feature."""
        self._checks[name] = check

    async def problems(self) -> dict[str, str]:
        """The reasons why the service is not ready, by the names of the checks."""
        if self.draining:
            return {"service": "stopping"}
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
        return problems


@router.get("/live", summary="Liveness of the process", response_model=None)
@access(None)
async def live() -> Response:
    """200 as long as the process can respond."""
    return json_response({"status": "ok"})


@router.get(
    "/ready",
    summary="Readiness for requests",
    response_model=None,
    responses=problem_responses(503),
)
@access(None)
async def ready(request: Request) -> Response:
    """503 while the server starts or stops, and while a dependency is unavailable."""
    readiness: Readiness = request.app.state.readiness
    problems = await readiness.problems()
    if problems:
        detail = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise Unavailable(detail, code="not_ready", checks=problems)
    return json_response({"status": "ready"})
