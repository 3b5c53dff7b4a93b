"""Questions for a page, with a limit on the time that the page waits."""

from __future__ import annotations

import asyncio

from fastapi import Request

from app.core.errors import AppError
from app.dashboard.rendering import lists_of
from app.recommend.schemas import Questions

MAX_MAKING = 2
"""The maximum number of computations of questions at a time, on behalf of all pages."""


async def questions_soon(request: Request, user: str, n: int, seconds: float) -> Questions | None:
    """Questions for a user; None if they are not ready within ``seconds``.

    The first questions of a version take long with many users and items. Their computation
    continues, so that a later call finds them ready.
    """
    making: set[asyncio.Task[Questions]] = request.app.state.questions_in_making
    if len(making) >= MAX_MAKING:
        return None
    task = asyncio.create_task(lists_of(request).questions.questions(user, n))
    making.add(task)
    task.add_done_callback(making.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        return None
    try:
        return task.result()
    except AppError:  # too many are being made: the page has more to show
        return None
