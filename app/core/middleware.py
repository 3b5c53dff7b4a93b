"""ASGI middleware: request ids, errors, and limits on the number of requests in progress."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from app.core.access import ACCESS_KEY, CALLER_KEY, RouteAccess
from app.core.errors import REQUEST_ID_KEY, AppError, Unavailable, problem, problem_of
from app.core.ids import random_hex
from app.core.logging import get_logger

log = get_logger(__name__)

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    # Responses belong to one caller, and may differ the next time.
    (b"cache-control", b"no-store"),
)
_CACHED_HEADERS = SECURITY_HEADERS[:-1]
# With no-referrer a browser hides the origin of a page's own forms, too.
_PAGE_HEADERS = tuple(
    (name, b"same-origin" if name == b"referrer-policy" else value)
    for name, value in SECURITY_HEADERS
)
ErrorPage = Callable[[Scope, AppError], Response]
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")

RELEASE_KEY = "ncr.release"
"""Key of the ASGI scope that holds the function which gives a request's slot to others."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of the first header with a name in lower case; None without that header."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class RequestContext:
    """Gives each request an id, logs requests, and turns unexpected errors into status 500.

    The log names the key's id for writes and for requests to administrators' routes, also if they
    are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        log_requests: bool = False,
        observe: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None,
    ) -> None:
        self.app = app
        self.log_requests = log_requests
        self.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with an id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent_id = header(scope, b"x-request-id")
        if sent_id is not None and _REQUEST_ID.fullmatch(sent_id):
            request_id = sent_id.decode("ascii")
        else:
            request_id = random_hex(8)
        scope[REQUEST_ID_KEY] = request_id
        access: RouteAccess = scope[ACCESS_KEY]
        headers = SECURITY_HEADERS
        if access.page or access.cached:
            headers = _PAGE_HEADERS if access.page else _CACHED_HEADERS
        added = ((b"x-request-id", request_id.encode("ascii")), *headers)
        # Every log line of this request contains its id.
        bind_contextvars(request_id=request_id)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            if status:
                _log_failure(scope)
                raise
            await _answer_failure(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.observe(scope, status, seconds)
            # Under overload there are many 503: a log line for each would add to it.
            failed = status >= 500 and status != 503
            caller = scope.get(CALLER_KEY)
            audited = caller is not None and scope[ACCESS_KEY].audited
            if failed or audited or self.log_requests:
                write = log.info if failed or audited else log.debug
                write(
                    "request",
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round(seconds * 1000, 2),
                    **({} if caller is None else {"key_id": caller.key_id}),
                )


class AnswerRefusals:
    """Turns errors of the application below into responses that outer middleware can observe.

    The middleware for CORS is outside, so that a page of an allowed origin may read the responses.

    Args:
        app: the application below.
        error_page: makes the answer to a failed request for a page.
    """

    def __init__(self, app: ASGIApp, *, error_page: ErrorPage | None = None) -> None:
        self.app = app
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and respond to errors."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except AppError as error:
            if started:
                raise
            if self._error_page is not None and scope[ACCESS_KEY].page:
                answer = self._error_page(scope, error)
            else:
                answer = problem_of(error, scope.get(REQUEST_ID_KEY))
            await answer(scope, receive, send)
        except asyncio.CancelledError:
            # The server's grace for stopping is over. The client can try again, elsewhere.
            if started:
                raise
            stopping = Unavailable("the service is stopping", code="stopping")
            await problem_of(stopping, scope.get(REQUEST_ID_KEY))(scope, receive, send)
        except Exception:
            if started:
                raise
            await _answer_failure(scope, receive, send)


def _log_failure(scope: Scope) -> None:
    log.exception(
        "request failed",
        request_id=scope[REQUEST_ID_KEY],
        method=scope["method"],
        path=scope["path"],
    )


async def _answer_failure(scope: Scope, receive: Receive, send: Send) -> None:
    _log_failure(scope)
    await problem(
        500,
        "internal_error",
        "Internal Server Error",
        "the service failed; its log names the cause with this request id",
        request_id=scope[REQUEST_ID_KEY],
    )(scope, receive, send)


class ConcurrencyLimiter:
    """A limit for work without a bounded queue of its own. Work beyond the limit gets 503."""

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

    Under more load than a server can take, requests wait for one another in many queues. The limit
    keeps admitted requests fast, and a refusal costs little time. A request that has to wait long
    in a bounded queue gives its slot to others by the function in its scope, see `RELEASE_KEY`. Any
    other slot becomes free before the answer is sent, as clients may take any time to read.

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

        async def release_and_send(message: Message) -> None:
            release()
            await send(message)

        scope[RELEASE_KEY] = release
        try:
            await self.app(scope, receive, release_and_send)
        finally:
            release()
