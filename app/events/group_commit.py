"""Group commit: events of many requests share one transaction, and the requests wait for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from app.core.database import AWAY
from app.core.errors import Unavailable
from app.core.logging import get_logger
from app.events.schemas import AppendResult, NewEvent

log = get_logger(__name__)

Commit = Callable[[Sequence[Sequence[NewEvent]]], Awaitable[list[AppendResult]]]
CommitObserver = Callable[[int, float], None]
"""Called after each commit with its number of rows and its duration in seconds."""

QUIET_SECONDS = 0.001  # without another request: a burst of requests has ended
MAX_ROWS = 5_000
"""The largest number of rows of a group, if the rows wait already. The events of a group share
pages of the indexes, and a commit writes each page once. On SQLite, 1,000 events change 1,700 pages
and 5,000 events change 1,800 pages."""


def ignore_commit(rows: int, seconds: float) -> None:
    """Ignore a commit: the default observer."""


@dataclass(slots=True, eq=False)
class _Request:
    rows: Sequence[NewEvent]
    done: asyncio.Future[AppendResult]


class GroupCommit:
    """A bounded queue of requests, which one task writes in groups.

    A commit takes about as long for one row as for hundreds of rows, mostly to wait for the disk.
    Requests that arrive during a commit form the next group.
    """

    def __init__(
        self,
        commit: Commit,
        *,
        group_rows: int,
        group_ms: float,
        buffer_rows: int,
        max_rows: int = 0,
        observe: CommitObserver = ignore_commit,
    ) -> None:
        """Create the queue. `start()` starts the task.

        Args:
            commit: writes the rows of several requests in one transaction.
            group_rows: the number of rows at which a group stops waiting for others. A group has at
                most so many requests, because each request is retried alone after a failed commit.
            group_ms: the time that the first request of a group waits for others, in milliseconds.
            buffer_rows: the largest number of rows that wait or are being written.
            max_rows: the largest number of rows of a group, if the rows wait already.
            observe: called after each commit.
        """
        self._commit = commit
        self._group_rows = group_rows
        self._max_rows = max(group_rows, max_rows)
        self._group_seconds = group_ms / 1000
        self._buffer_rows = buffer_rows
        self._observe = observe
        self._waiting: deque[_Request] = deque()
        self._waiting_rows = 0
        self._writing: list[_Request] = []
        self._pending_rows = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Condition()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pending_rows(self) -> int:
        """Rows that are waiting or being written."""
        return self._pending_rows

    def start(self) -> None:
        """Start the task that writes."""
        self._task = asyncio.create_task(self._run(), name="group-commit")

    async def submit(self, rows: Sequence[NewEvent], *, wait: bool = False) -> AppendResult:
        """Write rows in one transaction and return after its commit.

        After a cancellation of the caller, the task still writes the rows.

        Args:
            rows: the rows of one request.
            wait: whether to wait while the queue is full, instead of raising. A stream waits,
                because a stream has only one group of rows pending at a time.

        Raises:
            Unavailable: the queue is full, the service is stopping, or the database is
                unavailable.
        """
        if wait:
            async with self._room:
                await self._room.wait_for(lambda: self._stopping or self._has_room(len(rows)))
        if self._stopping:
            raise _shutting_down()
        if not self._has_room(len(rows)):
            raise Unavailable("too many events are waiting to be written", code="backpressure")
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._waiting_rows += len(rows)
        self._pending_rows += len(rows)
        self._arrived.set()
        return await asyncio.shield(request.done)

    def _has_room(self, rows: int) -> bool:
        # An empty queue takes a request of any size: it could never be written otherwise.
        return self._pending_rows == 0 or self._pending_rows + rows <= self._buffer_rows

    async def drain(self) -> None:
        """Refuse new rows, write the pending ones, and stop the task."""
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
            # Cancelled when draining took too long: no request may wait for ever.
            for request in (*self._writing, *self._waiting):
                if not request.done.done():
                    request.done.set_exception(_shutting_down())

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
                self._pending_rows -= rows
                async with self._room:
                    self._room.notify_all()

    async def _gather(self) -> None:
        """Wait for more requests while they keep coming, up to the limits on time and rows."""
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
            and rows + len(self._waiting[0].rows) <= self._max_rows
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
            if _is_away(error):
                log.error("events not written", error=str(error).partition("\n")[0])
                # Retried alone, each request would wait for the database in turn. Each has an
                # error of its own, because a stream adds its numbers to it.
                for request in group:
                    _fail(request, _cannot_write())
            elif len(group) > 1:
                log.warning("group commit failed, retrying one by one", requests=len(group))
                # One request that cannot be written must not take the others with it.
                for request in group:
                    await self._write([request])
            else:
                _fail(group[0], error)
            return
        self._observe(sum(len(r.rows) for r in group), time.perf_counter() - started)
        for request, result in zip(group, results, strict=True):
            if not request.done.done():
                request.done.set_result(result)


def _fail(request: _Request, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)
        # Retrieved here, because the caller may have gone: asyncio would log it as never retrieved.
        request.done.exception()


def _shutting_down() -> Unavailable:
    return Unavailable("the service is stopping", code="shutting_down")


def _cannot_write() -> Unavailable:
    return Unavailable("the database cannot be written to", code="storage_unavailable")


def _is_away(error: Exception) -> bool:
    """Whether a commit failed because the database is unreachable or busy."""
    if isinstance(error, (*AWAY, OSError)):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated
