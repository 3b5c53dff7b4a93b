"""Periodic tasks: maintenance that a worker repeats beside its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.core.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeriodicTask:
    """Work to repeat ``every_s`` seconds after it last ended, while a worker runs.

    Every worker repeats it, perhaps at the same moment, so running it twice must be harmless. Jobs
    never wait for it.
    """

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]


class PeriodicTasks:
    """Runs each periodic task in an asyncio task of its own."""

    def __init__(self, tasks: Sequence[PeriodicTask]) -> None:
        self._periodic_tasks = tasks
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Runs every periodic task at once, then at its interval."""
        self._running = {asyncio.create_task(_repeat(task)) for task in self._periodic_tasks}

    async def stop(self) -> None:
        """Cancels the tasks under way, which must bear that as they must bear a power cut."""
        for running in self._running:
            running.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._running = set()


async def _repeat(task: PeriodicTask) -> None:
    while True:
        try:
            await task.run()
        except Exception as error:
            # The database may be away for a while; the next run may succeed.
            reason = str(error).partition("\n")[0]
            log.warning("periodic task failed", task=task.name, error=reason)
        await asyncio.sleep(task.every_s)
