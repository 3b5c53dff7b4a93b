"""Group commit: events of many requests share a transaction, and each waits for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from app.core.errors import Unavailable
from app.core.logging import get_logger
from app.events.schemas import AppendResult, NewEvent

log = get_logger(__name__)

Commit = Callable[[Sequence[Sequence[NewEvent]]], Awaitable[list[AppendResult]]]

QUIET_SECONDS = 0.001  # without another request: those that come together have come
MOST_ROWS = 5_000
"""Rows of one group, where lists wait. Their events fall on the same pages of the indexes, which
are then written once: on SQLite 1,000 events change 1,700 pages, 5,000 events 1,800."""


@dataclass(slots=True, eq=False)
class _Request:
    rows: Sequence[NewEvent]
    done: asyncio.Future[AppendResult]


class EventWriter:
    """Collects requests and commits them in groups.

    A commit costs about as much for one row as for hundreds, most of it the wait for the disk.
    What arrives while one is under way forms the next group by itself.
    """

    def __init__(
        self,
        commit: Commit,
        *,
        group_rows: int,
        group_ms: float,
        buffer_rows: int,
        most_rows: int = 0,
    ) -> None:
        """A group is written when it has `group_rows`, and takes more, up to `most_rows`, if they
        wait already; but no more than `group_rows` requests, which may have to be tried singly."""
        self._commit = commit
        self._group_rows = group_rows
        self._most_rows = max(group_rows, most_rows)
        self._group_seconds = group_ms / 1000
        self._buffer_rows = buffer_rows
        self._waiting: deque[_Request] = deque()
        self._waiting_rows = 0
        self._writing: list[_Request] = []
        # Waiting and being written: what the bound is on.
        self._held_rows = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Condition()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.on_group: Callable[[int, float], None] = lambda rows, seconds: None
        """Told of each commit: its rows, and how long it took."""

    @property
    def held_rows(self) -> int:
        """Rows that wait or are being written."""
        return self._held_rows

    def start(self) -> None:
        """Start to write."""
        self._task = asyncio.create_task(self._run(), name="event-writer")

    async def submit(self, rows: Sequence[NewEvent], *, wait: bool = False) -> AppendResult:
        """Have rows committed together, and return when they are.

        When too many wait already: an error, or with `wait` (for a stream, which has only one
        group under way at a time) its turn. A caller that is cancelled leaves the rows to be
        written.
        """
        if wait:
            async with self._room:
                await self._room.wait_for(lambda: self._stopping or self._has_room(len(rows)))
        if self._stopping:
            raise Unavailable("the service is stopping", code="shutting_down")
        if not self._has_room(len(rows)):
            raise Unavailable("too many events are waiting to be written", code="backpressure")
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._waiting_rows += len(rows)
        self._held_rows += len(rows)
        self._arrived.set()
        return await asyncio.shield(request.done)

    def _has_room(self, rows: int) -> bool:
        # An empty buffer takes a request of any size: it could never be taken otherwise.
        return self._held_rows == 0 or self._held_rows + rows <= self._buffer_rows

    async def drain(self) -> None:
        """Take nothing more, write what waits, and stop."""
        self._stopping = True
        self._arrived.set()
        async with self._room:
            self._room.notify_all()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        try:
            await self._serve()
        finally:
            # Cancelled, because draining took too long: nobody must wait for ever.
            for request in (*self._writing, *self._waiting):
                if not request.done.done():
                    request.done.set_exception(
                        Unavailable("the service is stopping", code="shutting_down")
                    )

    async def _serve(self) -> None:
        while self._waiting or not self._stopping:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self._waiting_rows < self._group_rows and not self._stopping:
                await self._gather()
            group = self._writing = self._next_group()
            rows = sum(len(request.rows) for request in group)
            try:
                await self._write(group)
            finally:
                self._held_rows -= rows
                async with self._room:
                    self._room.notify_all()

    async def _gather(self) -> None:
        """Wait for company: as long as it keeps coming, but not for long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._group_seconds
        while self._waiting_rows < self._group_rows and not self._stopping:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + QUIET_SECONDS)):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _next_group(self) -> list[_Request]:
        group = [self._waiting.popleft()]
        rows = len(group[0].rows)
        while (
            self._waiting
            and len(group) < self._group_rows
            and rows + len(self._waiting[0].rows) <= self._most_rows
        ):
            group.append(self._waiting.popleft())
            rows += len(group[-1].rows)
        self._waiting_rows -= rows
        return group

    async def _write(self, group: list[_Request]) -> None:
        started = time.perf_counter()
        try:
            results = await self._commit([request.rows for request in group])
        except Exception as error:
            told = _told(error)
            if isinstance(told, Unavailable):
                # The database is away: each by itself would wait for it, one after another.
                for request in group:
                    _fail(request, told)
            elif len(group) > 1:
                log.warning("group commit failed, one by one now", requests=len(group))
                # One request that cannot be written must not take the others with it.
                for request in group:
                    await self._write([request])
            else:
                _fail(group[0], told)
            return
        self.on_group(sum(len(r.rows) for r in group), time.perf_counter() - started)
        for request, result in zip(group, results, strict=True):
            if not request.done.done():
                request.done.set_result(result)


def _fail(request: _Request, told: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(told)
        # The caller may have gone; nobody would ever look at the exception then.
        request.done.exception()


def _told(error: Exception) -> Exception:
    """What the client is told: an unreachable or busy database is a matter of trying again."""
    away = isinstance(error, OperationalError | InterfaceError | PoolTimeoutError | OSError)
    if away or (isinstance(error, DBAPIError) and error.connection_invalidated):
        log.error("events not written", error=str(error).splitlines()[0])
        return Unavailable("the database cannot be written to", code="storage_unavailable")
    return error
