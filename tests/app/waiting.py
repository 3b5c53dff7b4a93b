"""Waiting for what happens elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 15) -> None:
    """Waits for something that another task or process does."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if not isinstance(found, bool):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)
