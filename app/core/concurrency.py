"""Limits on the number of requests in progress; further requests get 503."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.access import ACCESS_KEY
from app.core.errors import REQUEST_ID_KEY, Unavailable, problem_of

RELEASE_KEY = "ncr.release"


class ConcurrencyLimiter:
    """A limit for work that has no bounded queue of its own: 503 beyond it."""

    def __init__(
        self, limit: int, detail: str, code: str = "overloaded", retry_after: int = 1
    ) -> None:
        self.limit = limit
        self._detail, self._code, self._retry_after = detail, code, retry_after
        self._running = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Occupy a slot within the context.

        Raises:
            Unavailable: all slots are occupied.
        """
        if self._running >= self.limit:
            raise Unavailable(self._detail, code=self._code, retry_after=self._retry_after)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class ConcurrencyMiddleware:
    """Middleware: at most ``limits[name]`` requests at a time of each concurrency class.

    Under more load than a server can take, requests wait for one another in queues of every kind.
    With a bound on how many there are, those that are admitted are answered as fast as ever, and
    refusing one costs next to nothing. A request that is going to wait for long, in a queue with a
    bound of its own, gives its slot to others by the call that its scope holds as `RELEASE_KEY`.

    Args:
        app: the application below.
        limits: the largest number of requests in progress, by the class that routes declare.
        on_refused: called for each refused request.
    """

    def __init__(
        self, app: ASGIApp, *, limits: Mapping[str, int], on_refused: Callable[[], None]
    ) -> None:
        self.app = app
        self._limits = limits
        self._on_refused = on_refused
        self._running = dict.fromkeys(limits, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or (name := scope[ACCESS_KEY].concurrency) is None:
            await self.app(scope, receive, send)
            return
        running = self._running
        if running[name] >= self._limits[name]:
            self._on_refused()
            error = Unavailable("too many requests are in progress", code="overloaded")
            await problem_of(error, scope.get(REQUEST_ID_KEY))(scope, receive, send)
            return
        running[name] += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                running[name] -= 1

        scope[RELEASE_KEY] = release
        try:
            await self.app(scope, receive, send)
        finally:
            release()
