"""What a worker does beside its jobs, at intervals: any number of workers may do it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.core.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to do every ``every_s`` seconds while a worker runs.

    Several workers do it each, perhaps at the same moment, so what it does has to be harmless when
    it is done twice. It is never waited for: jobs are claimed and kept meanwhile.
    """

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]


class Chores:
    """Runs chores beside a worker's jobs, each in a task of its own."""

    def __init__(self, chores: Sequence[Chore]) -> None:
        self._chores = chores
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Each begins at once, and again at intervals from the end of its last time."""
        self._tasks = {asyncio.create_task(_repeat(chore)) for chore in self._chores}

    async def stop(self) -> None:
        """Ends what is under way: a chore has to bear that, as it has to bear a power cut."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = set()


async def _repeat(chore: Chore) -> None:
    while True:
        try:
            await chore.run()
        except Exception as error:
            # The database may be away for a while; the next time may be better.
            log.warning("chore failed", chore=chore.name, error=str(error).partition("\n")[0])
        await asyncio.sleep(chore.every_s)
