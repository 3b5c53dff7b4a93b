"""ASGI middleware: request ids, unexpected errors, and limits on bodies."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from app.core.access import ACCESS_KEY, RouteAccess
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

log = get_logger(__name__)

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    # Responses belong to one caller, and may differ the next time.
    (b"cache-control", b"no-store"),
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
NDJSON = b"application/x-ndjson"
_BODY_TYPES = (b"application/json", NDJSON)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header with that name, which is in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def media_type(scope: Scope) -> bytes:
    """The media type of the request's body, without its parameters."""
    return (header(scope, b"content-type") or b"").split(b";", 1)[0].strip().lower()


class RequestContext:
    """Gives each request an id, logs it, and turns unexpected errors into 500."""

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
            request_id = os.urandom(8).hex()
        scope[REQUEST_ID_KEY] = request_id
        added = ((b"x-request-id", request_id.encode("ascii")), *SECURITY_HEADERS)
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
                "the service failed; its log has the reason under this request id",
                request_id=request_id,
            )(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.observe(scope, status, seconds)
            # Under overload there are many 503: a log line for each would add to it.
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
    """Turns errors that middleware raises into responses, which outer middleware can observe."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and respond to errors."""
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


class BodyLimit:
    """Refuses bodies that are too large or in an unsupported format.

    The media type is checked on every write: a browser sends simple types across origins without
    a preflight request, but not JSON. NDJSON is for routes that are declared as streamed.

    Args:
        app: the application below.
        max_bytes: the limit of routes that declare none.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless its body is refused."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = _content_length(scope)
        if not length and header(scope, b"transfer-encoding") is None:
            await self.app(scope, receive, send)
            return
        access: RouteAccess = scope[ACCESS_KEY]
        body_type = media_type(scope)
        if scope["method"] not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            if body_type not in _BODY_TYPES:
                raise UnsupportedMedia("send application/json or application/x-ndjson")
            if (header(scope, b"content-encoding") or b"identity").lower() != b"identity":
                raise UnsupportedMedia("send the body without content-encoding")
        if body_type == NDJSON:
            if not access.streamed:
                raise UnsupportedMedia("this route does not take NDJSON; send application/json")
            await self.app(scope, receive, send)
            return
        max_bytes = self.max_bytes if access.max_body_bytes is None else access.max_body_bytes
        too_large = PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
        if length > max_bytes:
            raise too_large
        total = 0

        async def receive_limited() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > max_bytes:
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
