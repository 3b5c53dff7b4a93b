"""Questions for a page, which waits for them only shortly."""

from __future__ import annotations

import asyncio

from fastapi import Request

from app.core.errors import AppError
from app.dashboard.rendering import lists_of
from app.recommend.schemas import Questions

MAX_MAKING = 2
"""Questions that are still being made for pages that did not wait."""


async def questions_soon(request: Request, user: str, n: int, seconds: float) -> Questions | None:
    """Questions for a user, if they are made within so many seconds.

    The first ones of a version take long where there are many users and items. They are made all
    the same, and are there the next time.
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
