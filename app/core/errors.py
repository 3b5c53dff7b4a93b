"""The error classes of the service, and their responses as problem documents (RFC 9457)."""

# ruff: noqa: N818 - the classes have the names of HTTP status codes

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from app.core.access import AccessTable
from app.core.database import AWAY
from app.core.logging import get_logger

_log = get_logger(__name__)

PROBLEM_TYPE = "application/problem+json"
REQUEST_ID_KEY = "ncr.request_id"


class SettingsError(Exception):
    """An unusable setting. The message is one line and contains no secret."""


class AppError(Exception):
    """Base class of errors that clients see: an HTTP status, a stable code and a sentence."""

    status: ClassVar[int] = 500
    code: str = "internal_error"
    title: ClassVar[str] = "Internal Server Error"

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers: dict[str, str] = dict(headers or {})
        self.fields = fields
        if code is not None:
            self.code = code


class BadRequest(AppError):
    """The request is malformed."""

    status, code, title = 400, "bad_request", "Bad Request"


class Unauthorized(AppError):
    """The API key is missing or unknown."""

    status, code, title = 401, "unauthorized", "Unauthorized"

    def __init__(self, detail: str, **more: Any) -> None:
        super().__init__(detail, **more)
        self.headers.setdefault("WWW-Authenticate", 'ApiKey header="X-API-Key"')


class Forbidden(AppError):
    """The caller lacks the permission for the request."""

    status, code, title = 403, "forbidden", "Forbidden"


class NotFound(AppError):
    """The resource does not exist."""

    status, code, title = 404, "not_found", "Not Found"


class Conflict(AppError):
    """The state of the resource does not permit the request."""

    status, code, title = 409, "conflict", "Conflict"


class PayloadTooLarge(AppError):
    """The request exceeds a size limit."""

    status, code, title = 413, "payload_too_large", "Content Too Large"


class UnsupportedMedia(AppError):
    """The format of the body is not supported."""

    status, code, title = 415, "unsupported_media_type", "Unsupported Media Type"


class Unprocessable(AppError):
    """The request is well-formed, but its values are invalid."""

    status, code, title = 422, "invalid_request", "Unprocessable Content"


class TooManyRequests(AppError):
    """The caller exceeded its rate limit."""

    status, code, title = 429, "rate_limited", "Too Many Requests"


class Unavailable(AppError):
    """Temporary failure: overload, shutdown, or an unreachable database."""

    status, code, title = 503, "unavailable", "Service Unavailable"

    def __init__(self, detail: str, *, retry_after: int = 1, **more: Any) -> None:
        super().__init__(detail, **more)
        self.headers.setdefault("Retry-After", str(retry_after))


def problem(
    status: int,
    code: str,
    title: str,
    detail: str,
    *,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Response:
    """A problem document as a response."""
    body: dict[str, Any] = {
        "type": f"urn:ncr:error:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        **(fields or {}),
    }
    if request_id is not None:
        body["request_id"] = request_id
    return Response(_dump(body), status, dict(headers or {}), PROBLEM_TYPE)


def problem_of(error: AppError, request_id: str | None = None) -> Response:
    """The response for an `AppError`."""
    return problem(
        error.status,
        error.code,
        error.title,
        error.detail,
        request_id=request_id,
        headers=error.headers,
        fields=error.fields,
    )


def _dump(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        # Details may quote the client: lone surrogates and integers beyond 64 bits, too.
        return orjson.dumps(_serialisable(body))


def _serialisable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_serialisable(str(key)): _serialisable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_serialisable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    return str(type(value).__name__)


def _request_id(request: Request) -> str | None:
    value = request.scope.get(REQUEST_ID_KEY)
    return value if isinstance(value, str) else None


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)  # noqa: S101 - what it is registered for
    return problem_of(error, _request_id(request))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - what it is registered for
    problems = error.errors()
    if any(item["type"] == "json_invalid" for item in problems):
        return problem_of(malformed_json(), _request_id(request))
    # Not the input itself: it may be large, or not even expressible in JSON.
    errors = [
        {"loc": [str(part)[:100] for part in item["loc"]], "msg": item["msg"][:300]}
        for item in problems[:100]
    ]
    first = errors[0]
    detail = f"{'.'.join(first['loc'])}: {first['msg']}"
    return problem_of(Unprocessable(detail, errors=errors), _request_id(request))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        table: AccessTable = request.app.state.access
        if allowed := table.allowed_methods(request.scope["path"]):
            headers["Allow"] = ", ".join(allowed)
    return problem(
        status.value,
        status.name.lower(),
        status.phrase,
        str(error.detail),
        request_id=_request_id(request),
        headers=headers,
    )


async def _database_unavailable(request: Request, error: Exception) -> Response:
    # The reason may hold an address or a user name: it belongs in the log.
    _log.warning("the database did not answer", error=str(error).partition("\n")[0])
    unavailable = Unavailable(
        "the database does not answer; try again", code="database_unavailable"
    )
    return problem_of(unavailable, _request_id(request))


async def _client_disconnect(request: Request, error: Exception) -> Response:
    # Nobody reads this response, but it is not counted as a failure of the service.
    return problem_of(
        BadRequest("the body ended too early", code="incomplete_body"), _request_id(request)
    )


def malformed_json(detail: str = "the body is not valid JSON") -> BadRequest:
    """The error for a body that is not JSON."""
    return BadRequest(detail, code="malformed_json")


def install_error_handlers(app: FastAPI) -> None:
    """Turn every error into a problem document. `RequestContext` handles unexpected errors."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    for kind in AWAY:
        app.add_exception_handler(kind, _database_unavailable)


PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "A problem document by RFC 9457. The `code` is stable, and the `detail` is "
    "for people.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "request_id": {"type": "string"},
    },
}


_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds to wait before a retry.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route that may respond with these error statuses."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status in (429, 503):
        response["headers"] = _RETRY_AFTER
    return response
