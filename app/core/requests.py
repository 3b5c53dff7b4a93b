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
from pydantic import AfterValidator, Field, ValidationError
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
"""Larger bodies are parsed in a thread, and their number is limited."""
MAX_LARGE_BODIES = 4
"""Large bodies that are read and parsed at a time, if each has the largest size."""
MAX_BODY_SECONDS = 120.0  # for a large body to come whole
LARGE_BYTES_PER_SECOND = 64 * 2**20
"""Of all large bodies together that are read: some ten times what can be stored of them."""
PACE_SECONDS = 0.004  # of reading at that rate: timers are no finer than a millisecond
STEP_SECONDS = 0.001  # of work on a large body, followed by as long a rest
MAX_ROWS_AT_ONCE = 1_000
"""Rows of a list that are validated and answered before other requests have a turn."""
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

    The media type is checked on every write: a browser sends simple types across origins without
    a preflight request, but not JSON. NDJSON is for routes that are declared as streamed.

    Large bodies count to the start of the answer, by the bytes that have come: beyond
    ``MAX_LARGE_BODIES`` of the largest size further ones are 503. One that has not come whole after
    ``MAX_BODY_SECONDS`` is refused, so that nobody holds that memory by sending slowly. They are
    read in turns, a chunk of each, and no faster than ``LARGE_BYTES_PER_SECOND`` in all: each chunk
    takes time from the requests beside it, and a client on the same network sends them endlessly.

    Args:
        app: the application below.
        max_bytes: the limit of routes that declare none.
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
    """A route that refuses query parameters it does not have: a misspelt filter filters nothing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a look at the names of the parameters."""
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
    """The names of the query parameters of an endpoint and of what it depends on."""
    return {parameter.alias for parameter in dependant.query_params}.union(
        *map(_query_names, dependant.dependencies)
    )


class _Known(NamedTuple):
    answer: Callable[[Request, str], Awaitable[Response]]
    size: int
    """Bytes: a short id in a query takes up to twelve times its length as an object."""


class KnownQueries(StrictQuery):
    """A route below one id that parses a query string once.

    Its endpoint leaves in ``request.state.answer`` what answers a request for an id, with the
    parsed query, where the query may come again. The next request with the same query string
    goes straight there, past FastAPI.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.known: LRUCache[bytes, _Known] = LRUCache(MAX_KNOWN_BYTES, lambda known: known.size)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, past FastAPI where its query string is known."""
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
    """Why a value is not a string of 1 to `limit` bytes of UTF-8; None if it is one."""
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
    """Return the UTC time so many microseconds after 1970; as JSON, ISO-8601 with a Z."""
    return _EPOCH + timedelta(microseconds=micros)


def decode_id(raw: str) -> str:
    """The id in a path segment that is still percent-encoded (see `ResolveRoute`)."""
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
    """JSON Schema of the strings that `text_problem` accepts; it counts characters, not bytes."""
    return {"minLength": 1, "maxLength": limit, "pattern": NO_NUL}


Id = Annotated[str, Field(json_schema_extra=text_schema())]
"""An id in a body or a query: documented here, checked by `text_problem`."""

PathId = Annotated[
    str,
    AfterValidator(decode_id),
    Path(
        description="The id: 1 to 256 bytes of UTF-8, percent-encoded as one segment of the path.",
        json_schema_extra=text_schema(),
    ),
]
"""A path parameter that holds an id. Any route can use it: `async def get(user: PathId)`."""


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
    """What became of the rows of a list; both lists are emptied.

    Args:
        outcome: the answer; its ``rejected`` is added here.
        rows: the list as it was sent.
        rejected: what was rejected of it.
        as_row: what is shown of each of those.
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
    """The whole body. A large one grows as it comes: to join its chunks would take long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    return body if len(body) > LARGE_BODY_BYTES else bytes(body)


async def read_json(request: Request) -> Any:
    """The body as JSON in the strict sense; 400 if it is not."""
    try:
        return await parse_json(await read_body(request), orjson.loads)
    except ValueError:
        raise malformed_json() from None


async def parse_json(body: bytes | bytearray, loads: Callable[[bytes], Any]) -> Any:
    """The JSON of a body; a large one is parsed in a thread.

    Raises:
        ValueError: the body is malformed.
        PayloadTooLarge: a large body has too many values, or a row that is too large.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return loads(bytes(body))
    return await in_turn(_parse_large(body, loads))


async def in_turn(work: Steps[Value]) -> Value:
    """The result of work on a large body, whose steps are done in a thread.

    There is one such thread, and each work in progress has a turn after the other: the steps hold
    Python's lock, so several threads would take no less time. After each turn the thread rests for
    as long as that took. The requests beside it keep half of the time, whatever is sent.
    """
    loop = asyncio.get_running_loop()
    while True:
        ended = await loop.run_in_executor(_large_bodies, _some_steps, work)
        if ended is not None:
            return ended[0]


def at_once(work: Steps[Value]) -> Value:
    """The result of work that is done in one go."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: Value = end.value
            return value


def _some_steps(work: Steps[Value]) -> tuple[Value] | None:
    """A turn; the result after the last step."""
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
    """Where a body begins and ends without the white space around it, of which no copy is made."""
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
    """The body as JSON in the strict sense; an empty object where there is none."""
    body = await read_body(request)
    try:
        return await parse_json(body, orjson.loads) if body else {}
    except ValueError:
        raise malformed_json() from None


OptionalJson = Annotated[Any, Depends(read_optional_json)]
"""The body of a route that needs none, described in the route's ``openapi_extra``."""


def invalid_body(error: ValidationError) -> Unprocessable:
    """The error for the first problem of a body, without the values that were sent."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part)[:100] for part in first["loc"]) or "body"
    return Unprocessable(f"{where}: {first['msg']}")


def loads_lenient(body: bytes) -> Any:
    """Parse JSON that may contain NaN, infinities, huge numbers and lone surrogates.

    The rows of a list are validated one by one, so that such a value concerns one row only.

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
        Unprocessable: the cursor is not one that this service made.
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
