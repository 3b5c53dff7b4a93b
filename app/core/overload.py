"""Refuses requests when as many are being answered as can be in good time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import REQUEST_ID_KEY, Unavailable, problem_of

RELEASE_KEY = "ncr.release"


class Places:
    """For what has no queue with a bound: at most ``most`` at a time, 503 for the others."""

    def __init__(
        self, most: int, full: str, code: str = "overloaded", retry_after: int = 1
    ) -> None:
        self.most = most
        self._full, self._code, self._retry_after = full, code, retry_after
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A place until the end. Raises Unavailable where there is none."""
        if self._taken >= self.most:
            raise Unavailable(self._full, code=self._code, retry_after=self._retry_after)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class Concurrency:
    """Middleware: at most ``limit`` GET requests below ``prefix`` at a time, 503 for the others.

    Under more load than a server can take, requests wait for one another in queues of every kind.
    With a bound on how many there are, those that are taken in are answered as fast as ever, and
    refusing one costs next to nothing. ``on_refused`` counts. What is going to wait for long, in a
    queue with a bound of its own, gives its place to others by the call in its scope.
    """

    def __init__(
        self, app: ASGIApp, *, prefix: str, limit: int, on_refused: Callable[[], None]
    ) -> None:
        self.app = app
        self._prefix = prefix
        self._limit = limit
        self._on_refused = on_refused
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not scope["path"].startswith(self._prefix)
            # A body may take its time to come: what it asks for has a bound of its own.
            or scope["method"] != "GET"
        ):
            await self.app(scope, receive, send)
            return
        if self._running >= self._limit:
            self._on_refused()
            error = Unavailable("more is asked than can be answered", code="overloaded")
            await problem_of(error, scope.get(REQUEST_ID_KEY))(scope, receive, send)
            return
        self._running += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._running -= 1

        scope[RELEASE_KEY] = release
        try:
            await self.app(scope, receive, send)
        finally:
            release()
