"""Reading requests: limits on bodies, query strings, ids, times, JSON, and cursors of pages."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote_to_bytes

import numpy as np
import orjson
from cachetools import LRUCache
from fastapi import Depends, Path, Query
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.access import ACCESS_KEY, RouteAccess
from app.core.errors import (
    BadRequest,
    PayloadTooLarge,
    Unavailable,
    Unprocessable,
    UnsupportedMedia,
    malformed_json,
)
from app.core.middleware import header
from app.core.tables import Place

LARGE_BODY_BYTES = 256 * 1024
"""The size above which a body is large. A thread parses large bodies, whose number is limited."""
MAX_LARGE_BODIES = 4
"""The number of large bodies in progress at a time, if each has the largest size."""
MAX_BODY_SECONDS = 120.0  # for a large body to come whole
LARGE_BYTES_PER_SECOND = 64 * 2**20
"""The rate at which the server reads all large bodies together. The database can store about a
tenth of that rate."""
PACE_SECONDS = 0.004  # of reading at that rate: timers are no finer than a millisecond
STEP_SECONDS = 0.001  # of work on a large body, followed by as long a rest
MAX_ROWS_AT_ONCE = 1_000
"""The rows of a list that the server validates and answers before other requests get a turn."""
ROWS_A_STEP = 100  # of a longer list
PART_BYTES = 64 * 1024  # of a large list, parsed at once: a parser holds Python's lock
BLOCK_BYTES = 128 * 1024  # of a large body, looked through at once
MAX_ROW_BYTES = 256 * 1024  # of a row in a large list
MAX_VALUES = 1_000_000  # of a large list; of another large body a tenth
MAX_ID_BYTES = 256
MAX_KNOWN_BYTES = 2**23  # of query strings that are kept, and what they were parsed to
MAX_QUERY_BYTES = 4096  # of one of them
NDJSON = b"application/x-ndjson"
FORM, CSV = b"application/x-www-form-urlencoded", b"text/csv"
_BODY_TYPES = (b"application/json", NDJSON)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
MAX_TIMESTAMP_US = (datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_large_bodies = ThreadPoolExecutor(1, "ncr-large-bodies")
Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""Work in steps of a fraction of a millisecond, and its result."""
_WHITE = b" \t\r\n"
_SIGNS = np.zeros(256, dtype=np.bool_)
_SIGNS[list(b'",[{]}')] = True
_DEPTHS = np.zeros(256, dtype=np.int32)
_DEPTHS[list(b"[{")], _DEPTHS[list(b"]}")] = 1, -1
NO_NUL = r"^[^\u0000]*$"
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def media_type(scope: Scope) -> bytes:
    """The media type of the request's body, without its parameters."""
    return (header(scope, b"content-type") or b"").split(b";", 1)[0].strip().lower()


class BodyLimit:
    """Refuses bodies that are too large or in an unsupported format.

    The middleware checks the media type of every write: a browser sends simple types across origins
    without a preflight request, but not JSON. Only routes that are declared as streamed accept
    NDJSON.

    A large body counts by its received bytes until the answer starts. Beyond ``MAX_LARGE_BODIES``
    of the largest size, further bodies get 503. The middleware refuses a body that is incomplete
    after ``MAX_BODY_SECONDS``, so that no client holds the memory by sending slowly.

    The middleware reads large bodies in turns of a chunk, and no faster than
    ``LARGE_BYTES_PER_SECOND`` in all. Each chunk takes time from other requests, and a client on
    the same network can send chunks without end.

    Args:
        app: the application below.
        max_bytes: the size limit of routes that declare none.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self._large_bytes = 0
        self._turns, self._ahead = asyncio.Lock(), 0.0

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
            if access.page:
                if body_type != (CSV if access.streamed else FORM):
                    raise UnsupportedMedia("this page accepts only its own forms")
            elif body_type not in _BODY_TYPES:
                raise UnsupportedMedia("send application/json or application/x-ndjson")
            if (header(scope, b"content-encoding") or b"identity").lower() != b"identity":
                raise UnsupportedMedia("send the body without content-encoding")
        if body_type == NDJSON or (access.page and access.streamed):
            if not access.streamed:
                raise UnsupportedMedia("this route does not accept NDJSON; send application/json")
            await self.app(scope, receive, send)
            return
        max_bytes = self.max_bytes if access.max_body_bytes is None else access.max_body_bytes
        too_large = PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
        if length > max_bytes:
            raise too_large
        too_many = Unavailable(
            "the server reads too many large bodies now; retry later", code="overloaded"
        )
        limit = MAX_LARGE_BODIES * max(self.max_bytes, max_bytes)
        total = held = 0
        began = time.monotonic()

        def hold(size: int) -> None:
            nonlocal held
            if size <= LARGE_BODY_BYTES or size <= held:
                return
            if self._large_bytes + size - held > limit:
                raise too_many
            if time.monotonic() - began > MAX_BODY_SECONDS:
                raise BadRequest("the client sends the body too slowly", code="body_too_slow")
            self._large_bytes += size - held
            held = size

        def release() -> None:
            nonlocal held
            self._large_bytes -= held
            held = 0

        async def receive_limited() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                total += size
                if total > max_bytes:
                    raise too_large
                hold(total)
                if total > LARGE_BODY_BYTES and message.get("more_body"):
                    async with self._turns:
                        self._ahead += size / LARGE_BYTES_PER_SECOND
                        if self._ahead >= PACE_SECONDS:
                            await asyncio.sleep(self._ahead)
                            self._ahead = 0.0
            return message

        async def release_and_send(message: Message) -> None:
            release()
            await send(message)

        if length > LARGE_BODY_BYTES and self._large_bytes + length > limit:
            raise too_many
        try:
            await self.app(scope, receive_limited, release_and_send)
        finally:
            release()


def _content_length(scope: Scope) -> int:
    value = header(scope, b"content-length")
    if value is None:
        return 0
    if not value.isdigit() or len(value) > 18:
        raise BadRequest("content-length is not a number")
    return int(value)


class StrictQuery(APIRoute):
    """A route that refuses unknown query parameters: a misspelt filter would have no effect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, after a check of the parameters' names."""
        handler = super().get_route_handler()
        known = _query_names(self.dependant)

        async def handle(request: Request) -> Response:
            for name in request.query_params if request.scope["query_string"] else ():
                if name not in known:
                    nearest = get_close_matches(name, known, 1)
                    hint = f"; did you mean {nearest[0]}?" if nearest else ""
                    raise Unprocessable(
                        f"query: unknown parameter {name[:100]}{hint}", code="unknown_parameter"
                    )
            return await handler(request)

        return handle


def _query_names(dependant: Dependant) -> set[str]:
    """The names of the query parameters of an endpoint and of its dependencies."""
    return {parameter.alias for parameter in dependant.query_params}.union(
        *map(_query_names, dependant.dependencies)
    )


class _Known(NamedTuple):
    answer: Callable[[Request, str], Awaitable[Response]]
    size: int
    """In bytes. As an object, a short id in a query takes up to 12 times its length."""


class KnownQueries(StrictQuery):
    """A route with one id in its path that parses each query string once.

    For a query that may come again, the endpoint sets ``request.state.answer``: a function that
    answers a request for an id with the parsed query. The next request with the same query string
    calls that function directly, past FastAPI.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.known: LRUCache[bytes, _Known] = LRUCache(MAX_KNOWN_BYTES, lambda known: known.size)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, past FastAPI if its query string is known."""
        known = self.known.get(scope["query_string"])
        if known is None or scope["method"] != "GET":
            await super().handle(scope, receive, send)
            answer, size = scope.get("state", {}).get("answer"), len(scope["query_string"])
            if answer is not None and size <= MAX_QUERY_BYTES:
                self.known[scope["query_string"]] = _Known(answer, 2_000 + 12 * size)
            return
        (raw_id,) = scope["path_params"].values()
        response = await known.answer(Request(scope, receive), decode_id(raw_id))
        await response(scope, receive, send)


def text_problem(value: Any, limit: int = MAX_ID_BYTES) -> str | None:
    """The reason why a value is not 1 to `limit` bytes of UTF-8 without NUL; None if it is."""
    if not isinstance(value, str):
        return "must be a string"
    if value.isascii():
        length = len(value)
    else:
        try:
            length = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            return "is not valid Unicode"
    if length == 0:
        return "must not be empty"
    if length > limit:
        return f"is longer than {limit} bytes of UTF-8"
    if "\0" in value:
        return "must not contain NUL"
    return None


def parse_timestamp(value: Any) -> int:
    """Parse ISO-8601 (UTC unless it names an offset) or epoch seconds to microseconds since 1970.

    Raises:
        ValueError: the value is neither, or lies outside the years 1970 to 2999.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("timestamp must be ISO-8601 or epoch seconds")
    try:
        if isinstance(value, str):
            parsed = datetime.fromisoformat(value[:64])
            if parsed.tzinfo is None:
                parsed = parsed.replace(tzinfo=UTC)
            micros = (parsed - _EPOCH) // _MICROSECOND
        elif isinstance(value, int):
            micros = value * 1_000_000
        else:
            micros = round(value * 1e6)
    except (ValueError, OverflowError):
        raise ValueError("timestamp must be ISO-8601 or epoch seconds") from None
    if not 0 <= micros <= MAX_TIMESTAMP_US:
        raise ValueError("timestamp must lie in the years 1970 to 2999")
    return micros


def datetime_of(micros: int) -> datetime:
    """Return the UTC time of microseconds since 1970. In JSON the time is ISO-8601 with a Z."""
    return _EPOCH + timedelta(microseconds=micros)


def decode_id(raw: str) -> str:
    """The id in a percent-encoded path segment (see `ResolveRoute`). Raises Unprocessable."""
    if "%" not in raw:
        value = raw
    elif _BROKEN_ESCAPE.search(raw):
        raise Unprocessable("the id in the path is not percent-encoded properly", code="invalid_id")
    else:
        try:
            value = unquote_to_bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            raise Unprocessable("the id in the path is not UTF-8", code="invalid_id") from None
    problem = text_problem(value)
    if problem is not None:
        raise Unprocessable(f"the id in the path {problem}", code="invalid_id")
    return value


def text_schema(limit: int = MAX_ID_BYTES) -> dict[str, Any]:
    """JSON Schema of the strings that `text_problem` accepts, with lengths in characters."""
    return {"minLength": 1, "maxLength": limit, "pattern": NO_NUL}


Id = Annotated[str, Field(json_schema_extra=text_schema())]


def as_integer(value: Any) -> Any:
    """A whole JSON number, such as 5.0, as an integer; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(as_integer)]
"""An integer in a body. In JSON 5.0 is as whole a number as 5."""
"""An id in a body or a query. The type documents the id, and `text_problem` checks the id."""

PathId = Annotated[
    str,
    AfterValidator(decode_id),
    Path(
        description="The id: 1 to 256 bytes of UTF-8, percent-encoded as one segment of the path.",
        json_schema_extra=text_schema(),
    ),
]
"""A path parameter that holds an id, as in `async def get(user: PathId)`."""


def _valid_prefix(prefix: str | None) -> str | None:
    if prefix and (problem := text_problem(prefix)) is not None:
        raise Unprocessable(f"prefix {problem}", code="invalid_prefix")
    return prefix or None


IdPrefix = Annotated[
    Annotated[str, Field(json_schema_extra={"maxLength": MAX_ID_BYTES, "pattern": NO_NUL})] | None,
    AfterValidator(_valid_prefix),
    Query(description="A prefix of the ids to list. Upper and lower case differ."),
]
"""A query parameter for the beginning of ids; None where it is left out or empty."""

PageSize = Annotated[
    int, Query(ge=1, le=1000, description="The maximum number of entries on a page.")
]
_CURSOR_QUERY = Query(description="The `next_cursor` of the page before.")
PageCursor = Annotated[
    Annotated[str, Field(max_length=200, json_schema_extra={"format": "cursor"})] | None,
    _CURSOR_QUERY,
]
"""A cursor that holds a position."""
PlaceCursor = Annotated[
    Annotated[str, Field(max_length=200, json_schema_extra={"format": "place-cursor"})] | None,
    _CURSOR_QUERY,
]
"""A cursor that holds a row, by its time and name."""


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON response, without the cost of a response model."""
    return Response(orjson.dumps(content), status, headers, "application/json")


async def outcome_response(
    outcome: dict[str, Any],
    rows: list[Any],
    rejected: list[Any],
    as_row: Callable[[Any], Any] = lambda rejected: rejected,
) -> Response:
    """The answer about the rows of a list. The call empties ``rows`` and ``rejected``.

    Args:
        outcome: the answer, without its ``rejected``.
        rows: the rows that the client sent.
        rejected: the rejected rows.
        as_row: makes the entry of the answer for a rejected row.
    """
    work = _outcome(outcome | {"rejected": []}, rows, rejected, as_row)
    is_long = max(len(rows), len(rejected)) > MAX_ROWS_AT_ONCE
    return Response(
        await in_turn(work) if is_long else at_once(work), 200, None, "application/json"
    )


def _outcome(
    outcome: dict[str, Any], rows: list[Any], rejected: list[Any], as_row: Callable[[Any], Any]
) -> Steps[bytes]:
    parts = []
    for start in range(0, len(rejected), ROWS_A_STEP):
        part = rejected[start : start + ROWS_A_STEP]
        parts.append(orjson.dumps([as_row(row) for row in part])[1:-1])
        yield
    before, name, after = orjson.dumps(outcome).partition(b'"rejected":[')
    body = before + name + b",".join(parts) + after
    for done in (rejected, rows):  # freed in steps, too
        while done:
            del done[-ROWS_A_STEP:]
            yield
    return body


async def read_body(request: Request) -> bytes | bytearray:
    """The whole body. A large body stays a ``bytearray``, because a copy would take long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    return body if len(body) > LARGE_BODY_BYTES else bytes(body)


async def read_json(request: Request) -> Any:
    """The body, parsed as strict JSON. Raises BadRequest for other bodies."""
    try:
        return await parse_json(await read_body(request), orjson.loads)
    except ValueError:
        raise malformed_json() from None


async def parse_json(body: bytes | bytearray, loads: Callable[[bytes], Any]) -> Any:
    """Parse the JSON of a body, in a thread if the body is large.

    Raises:
        ValueError: the body is malformed.
        PayloadTooLarge: a large body has too many values, or a row that is too large.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return loads(bytes(body))
    return await in_turn(_parse_large(body, loads))


async def in_turn(work: Steps[Value]) -> Value:
    """The result of work on large bodies, whose steps run in one thread.

    All work in progress takes turns of the thread. The steps hold Python's lock, so several threads
    would take no less time. After each turn the thread rests for as long as the turn took, so that
    other requests keep half of the time.
    """
    loop = asyncio.get_running_loop()
    while True:
        ended = await loop.run_in_executor(_large_bodies, _some_steps, work)
        if ended is not None:
            return ended[0]


def at_once(work: Steps[Value]) -> Value:
    """The result of work whose steps follow without a rest."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: Value = end.value
            return value


def _some_steps(work: Steps[Value]) -> tuple[Value] | None:
    """Do the steps of one turn. Return the result after the last step, else None."""
    began = time.perf_counter()
    try:
        while True:
            next(work)
            if time.perf_counter() - began >= STEP_SECONDS:
                return None
    except StopIteration as end:
        return (end.value,)
    finally:
        time.sleep(time.perf_counter() - began)


def _parse_large(body: bytes | bytearray, loads: Callable[[bytes], Any]) -> Steps[Any]:
    first, end = _without_space(body)
    is_list = body[first : first + 1] == b"[" and body[end - 1 : end] == b"]"
    max_values = MAX_VALUES if is_list else MAX_VALUES // 10
    values = 0
    for start in range(first, end, BLOCK_BYTES):
        block = body[start : start + BLOCK_BYTES]
        values += sum(block.count(sign) for sign in (b",", b"[", b"{"))
        if values > max_values:
            raise PayloadTooLarge(
                f"a body of this size has at most {max_values} values", code="too_many_values"
            )
        yield
    if not is_list:
        return loads(bytes(body))
    # Parts that are lists make a list, wherever the cuts are: what is malformed cannot pass.
    rows: list[Any] = []
    first += 1
    start, end = first, end - 1
    cuts = yield from _cuts(body)
    for cut in (*cuts, end):
        if cut - start > MAX_ROW_BYTES + PART_BYTES:  # small rows may be before it
            raise PayloadTooLarge(
                f"a row of this list is larger than {MAX_ROW_BYTES} bytes", code="row_too_large"
            )
        part = loads(b"[" + body[start:cut] + b"]")
        if not part and (start > first or cut < end):
            raise ValueError("a row is missing after a comma")
        rows += part
        start = cut + 1
        yield
    return rows


def _without_space(body: bytes | bytearray) -> tuple[int, int]:
    """The start and end of a body without the white space around it, found without a copy."""
    first, end = 0, len(body)
    while first < end and not (block := body[first : first + BLOCK_BYTES].lstrip(_WHITE)):
        first += BLOCK_BYTES
    if first < end:
        first = min(first + BLOCK_BYTES, end) - len(block)
    while first < end and not (block := body[max(first, end - BLOCK_BYTES) : end].rstrip(_WHITE)):
        end -= BLOCK_BYTES
    if first < end:
        end = max(first, end - BLOCK_BYTES) + len(block)
    return min(first, end), end


def _cuts(body: bytes | bytearray) -> Steps[list[int]]:
    """Positions of commas between rows of a list, at steps of about ``PART_BYTES``."""
    commas: list[NDArray[np.intp]] = []
    start = quotes = depth = 0
    while start < len(body):
        block = body[start : start + BLOCK_BYTES]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:  # an escape belongs into one block
            block = body[start : start + BLOCK_BYTES + 1]
        # Of the same length, without quotes that do not end a string.
        text = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        at = np.flatnonzero(_SIGNS[np.frombuffer(text, np.uint8)])
        signs = np.frombuffer(text, np.uint8)[at]
        within = quotes + np.cumsum(signs == ord('"'), dtype=np.int32)
        outside = (within & 1) == 0
        depths = depth + np.cumsum(_DEPTHS[signs] * outside, dtype=np.int32)
        commas.append(start + at[(signs == ord(",")) & outside & (depths == 1)])
        start += len(block)
        if len(at):
            quotes, depth = int(within[-1]), int(depths[-1])
        yield
    positions = np.concatenate(commas)
    steps = np.searchsorted(positions, np.arange(PART_BYTES, len(body), PART_BYTES))
    return [int(cut) for cut in positions[np.unique(steps[steps < len(positions)])]]


async def read_optional_json(request: Request) -> Any:
    """The body, parsed as strict JSON; an empty object without a body. Raises BadRequest."""
    body = await read_body(request)
    try:
        return await parse_json(body, orjson.loads) if body else {}
    except ValueError:
        raise malformed_json() from None


OptionalJson = Annotated[Any, Depends(read_optional_json)]
"""An optional body. The route's ``openapi_extra`` describes the body."""


def invalid_body(error: ValidationError) -> Unprocessable:
    """The error for the first problem of a body, without the client's values."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part)[:100] for part in first["loc"]) or "body"
    return Unprocessable(f"{where}: {first['msg']}")


def loads_lenient(body: bytes) -> Any:
    """Parse JSON that may contain NaN, infinities, huge numbers and lone surrogates.

    Endpoints validate the rows of a list one by one, so that a wrong value concerns only its row.

    Raises:
        ValueError: the JSON is malformed in another way.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        # Decoded here, because json.loads would also guess UTF-16 and UTF-32.
        return json.loads(body.decode("utf-8"), parse_int=_parse_int)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None


def _parse_int(digits: str) -> int | float:
    # Beyond that length no float holds it, and Python refuses to read more than 4,300 digits.
    return int(digits) if len(digits) <= 400 else float("inf")


def encode_cursor(position: int, name: str = "") -> str:
    """An opaque, url-safe cursor that continues below `position`."""
    return base64.urlsafe_b64encode(f"b{position}{name}".encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> int | None:
    """The position in a cursor.

    Raises:
        Unprocessable: the cursor is not from this service.
    """
    if cursor is None:
        return None
    return _decoded(cursor, b"")[0]


def _decoded(cursor: str, name: bytes) -> tuple[int, str]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        _bad_cursor()
    match = re.fullmatch(rb"b([0-9]{1,18})(%s)" % name, text)
    if match is None or encode_cursor(int(match[1]), match[2].decode()) != cursor:
        _bad_cursor()
    return int(match[1]), match[2].decode().removeprefix(":")


def next_cursor(following: int | None) -> str | None:
    """The cursor of the page that begins at a position; None after the last page."""
    return None if following is None else encode_cursor(following)


def encode_place(place: Place | None) -> str | None:
    """The cursor that continues below a row; None after the last page."""
    return None if place is None else encode_cursor(place.created_at, f":{place.name}")


def decode_place(cursor: str | None) -> Place | None:
    """The row in a cursor. Raises as `decode_cursor`."""
    return None if cursor is None else Place(*_decoded(cursor, rb":[\w.-]{1,64}"))


def _bad_cursor() -> NoReturn:
    raise Unprocessable("the cursor is not from this service", code="invalid_cursor")
