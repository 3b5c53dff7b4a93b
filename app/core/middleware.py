"""ASGI middleware: request ids and the last resort for errors, raw paths, limits on bodies."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from urllib.parse import quote, quote_from_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from app.core.errors import (
    REQUEST_ID_KEY,
    AppError,
    BadRequest,
    PayloadTooLarge,
    Unavailable,
    UnsupportedMedia,
    problem,
    problem_of,
)
from app.core.logging import get_logger
from app.core.randomness import random_hex

log = get_logger(__name__)

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    # What is answered is one caller's, and may be another the next time.
    (b"cache-control", b"no-store"),
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
# What may stand in a path as it is; `%` too, because what is encoded stays encoded.
_PATH_SAFE = "/%:@!$&'()*+,;=-._~"
NDJSON = b"application/x-ndjson"
_BODY_TYPES = (b"application/json", NDJSON)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def media_type(scope: Scope) -> bytes:
    """The media type of the request's body, without its parameters."""
    return (header(scope, b"content-type") or b"").split(b";", 1)[0].strip().lower()


class RequestContext:
    """Outermost: gives each request an id, logs it, and turns what nobody caught into a 500."""

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
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            request_id = given.decode("ascii")
        else:
            request_id = random_hex(8)
        scope[REQUEST_ID_KEY] = request_id
        added = ((b"x-request-id", request_id.encode("ascii")), *SECURITY_HEADERS)
        # Whatever is logged for this request, anywhere below, bears its id.
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
        except AppError as error:
            # Raised by middleware, where the application's handlers do not reach.
            if status:
                raise
            await problem_of(error, request_id)(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The server's grace for stopping is over. The client can try again, elsewhere.
            if status:
                raise
            stopping = Unavailable("the service is stopping", code="stopping")
            await problem_of(stopping, request_id)(scope, receive, send_with_id)
        except Exception:
            log.exception(
                "request failed",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
            )
            if status:
                raise
            await problem(
                500,
                "internal_error",
                "Internal Server Error",
                "the service failed to answer; its log has the reason under this request id",
                request_id=request_id,
            )(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.observe(scope, status, seconds)
            # 503 is said to many at once: a line for each would be part of the overload.
            failed = status >= 500 and status != 503
            if failed or self.log_requests:
                write = log.info if failed else log.debug
                write(
                    "request",
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round(seconds * 1000, 2),
                )


class AnswerRefusals:
    """Within all that looks at answers: what other middleware raises becomes one to be seen."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except AppError as error:
            if started or scope["type"] != "http":
                raise
            await problem_of(error, scope.get(REQUEST_ID_KEY))(scope, receive, send)


class RawPath:
    """Routes on the path as it was sent, so that an id with `%2F` in it stays one segment."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw = scope.get("raw_path")
            if raw:
                # Some servers leave the query in; a client may send UTF-8 without encoding it.
                path = quote_from_bytes(raw.partition(b"?")[0], safe=_PATH_SAFE)
            else:
                path = quote(scope["path"], safe=_PATH_SAFE.replace("%", ""), errors="replace")
            scope["path"] = path
        await self.app(scope, receive, send)


STREAMED = "/events"


class BodyLimit:
    """Refuses bodies that are too large or in a format that is not read.

    The type of a body is checked on every write: a browser sends the simple types across origins
    without asking, JSON it does not. NDJSON is streamed and read in groups, so it has no limit.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = _content_length(scope)
        if not length and header(scope, b"transfer-encoding") is None:
            await self.app(scope, receive, send)
            return
        kind = media_type(scope)
        if scope["method"] not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            if kind not in _BODY_TYPES:
                raise UnsupportedMedia("send application/json or application/x-ndjson")
            if (header(scope, b"content-encoding") or b"identity").lower() != b"identity":
                raise UnsupportedMedia("send the body without content-encoding")
        if kind == NDJSON:
            if scope["path"] != STREAMED:
                raise UnsupportedMedia(f"only {STREAMED} takes NDJSON")
            await self.app(scope, receive, send)
            return
        too_large = PayloadTooLarge(f"the body is larger than {self.max_bytes} bytes")
        if length > self.max_bytes:
            raise too_large
        total = 0

        async def receive_limited() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self.max_bytes:
                    raise too_large
            return message

        await self.app(scope, receive_limited, send)


def _content_length(scope: Scope) -> int:
    value = header(scope, b"content-length")
    if value is None:
        return 0
    if not value.isdigit() or len(value) > 18:
        raise BadRequest("content-length is not a number")
    return int(value)
