"""`/health/live` and `/health/ready`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.errors import Unavailable, problem_responses
from app.core.http import json_response
from app.core.logging import get_logger

log = get_logger(__name__)

Check = Callable[[], Awaitable[str | None]]
"""Returns why the service is not ready, or None."""

CHECK_SECONDS = 2.0

router = APIRouter(tags=["health"], prefix="/health")


class Readiness:
    """The checks of all features. Each adds its own; `draining` overrides them all."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self.draining = False

    def add(self, name: str, check: Check) -> None:
        """Let a feature say whether it is ready."""
        self._checks[name] = check

    async def problems(self) -> dict[str, str]:
        """What is not ready, by name, and why."""
        if self.draining:
            return {"service": "stopping"}
        found = {}
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
                found[name] = problem
        return found


@router.get("/live", summary="Whether the process answers", response_model=None)
async def live() -> Response:
    """Always 200 while the process can answer at all."""
    return json_response({"status": "ok"})


@router.get(
    "/ready",
    summary="Whether requests should be sent here",
    response_model=None,
    responses=problem_responses(503),
)
async def ready(request: Request) -> Response:
    """503 while starting, while stopping, and while something that is needed is away."""
    readiness: Readiness = request.app.state.readiness
    problems = await readiness.problems()
    if problems:
        detail = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise Unavailable(detail, code="not_ready", checks=problems)
    return json_response({"status": "ready"})
