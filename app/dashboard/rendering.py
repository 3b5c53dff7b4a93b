"""The rendering of pages: templates, their filters, forms, static files, and errors as pages."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

import orjson
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from app import __version__
from app.core.access import CALLER_KEY, SAFE_METHODS, Role
from app.core.database import AWAY
from app.core.errors import (
    REQUEST_ID_KEY,
    AppError,
    BadRequest,
    Unauthorized,
    Unavailable,
    Unprocessable,
    problem_of,
)
from app.core.logging import get_logger
from app.core.middleware import header
from app.core.requests import StrictQuery
from app.core.security import Caller, session_cookie
from app.dashboard.kept import KeptFigures
from app.recommend.wiring import RecommendFeature
from app.wiring import Services

log = get_logger(__name__)

ROOT = "/dashboard"
SIGN_IN = f"{ROOT}/sign-in"
MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 50
MAX_AGO_SECONDS = 60 * 86_400  # of a time that is shown as how long ago it was
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
PAGE_HEADERS = {"Content-Security-Policy": _POLICY}
MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class NavEntry(NamedTuple):
    """A link of the menu, for callers with the role."""

    path: str
    name: str
    role: Role


MENU = (
    NavEntry("", "Overview", Role.METRICS),
    NavEntry("/users", "Users", Role.HISTORY),
    NavEntry("/items", "Items", Role.RECOMMEND),
    NavEntry("/which", "Which of the two?", Role.RECOMMEND),
    NavEntry("/models", "Models", Role.ADMIN),
    NavEntry("/jobs", "Jobs", Role.ADMIN),
    NavEntry("/trials", "Trials", Role.ADMIN),
    NavEntry("/data", "Data", Role.METRICS),
)


def path_of(*segments: str) -> str:
    """The path of a page of the dashboard; each segment is percent-encoded."""
    return "/".join((ROOT, *(quote(segment, safe="") for segment in segments)))


def number(value: float | None, digits: int = 0) -> str:
    """A number with separators of thousands; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A fraction as a percentage; a dash for None."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Seconds in the largest unit that leaves a number of at least 2; a dash for None."""
    if seconds is None:
        return "–"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(n_bytes: float | None) -> str:
    """Bytes as MiB or GiB; a dash for None."""
    if n_bytes is None:
        return "–"
    gib = n_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{n_bytes / 2**20:.0f} MiB"


def moment(micros: int | None) -> datetime | None:
    """The UTC time of stored microseconds since 1970."""
    return None if micros is None else datetime.fromtimestamp(micros / 1e6, UTC)


def ago(micros: int | None) -> str:
    """The age of a stored time; the date if the age is above ``MAX_AGO_SECONDS``."""
    if micros is None:
        return "–"
    seconds = time.time() - micros / 1e6
    if seconds > MAX_AGO_SECONDS:
        return f"{datetime.fromtimestamp(micros / 1e6, UTC):%Y-%m-%d}"
    return "just now" if seconds < 5 else f"{duration(seconds)} ago"


def as_json(value: Any) -> str:
    """JSON for an attribute of an element, which the template escapes."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def static_file(name: str) -> tuple[bytes, bytes, str] | None:
    """The content of a static file, the compressed content, and a digest; None without the file."""
    # Only names that there are: those that strangers send would stay in memory.
    return _read_static(name) if name in STATIC_FILES else None


@cache
def _read_static(name: str) -> tuple[bytes, bytes, str]:
    content = resources.files("app.dashboard").joinpath("static", *name.split("/")).read_bytes()
    return content, gzip.compress(content, 9, mtime=0), hashlib.sha256(content).hexdigest()[:12]


STATIC_FILES = frozenset(
    (
        "app.css",
        "app.js",
        "icon.svg",
        "vendor/htmx.min.js",
        "vendor/uPlot.iife.min.js",
        "vendor/uPlot.min.css",
    )
)


def asset(name: str) -> str:
    """The path of a static file, which changes with its content."""
    found = static_file(name)
    assert found is not None, name  # noqa: S101 - templates name files that there are
    return f"{ROOT}/static/{found[2]}/{name}"


@cache
def environment() -> Environment:
    """The templates. Jinja escapes all values, because clients choose titles and ids."""
    made = Environment(
        loader=PackageLoader("app.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: tuple[Callable[..., Any], ...] = (number, percent, duration, ago, moment, size)
    made.filters |= {each.__name__: each for each in filters}
    made.filters["json"] = as_json
    made.globals |= {"path": path_of, "asset": asset, "Role": Role, "app_version": __version__}
    return made


def render(request: Request, template: str, status: int = 200, /, **context: Any) -> HTMLResponse:
    """A page or a part of one."""
    return _render(request.scope, template, status, context)


def _render(scope: Scope, template: str, status: int, context: dict[str, Any]) -> HTMLResponse:
    caller: Caller | None = scope.get(CALLER_KEY)
    roles = frozenset() if caller is None else caller.roles
    text = (
        environment()
        .get_template(template)
        .render(
            menu=[entry for entry in MENU if entry.role in roles],
            roles=roles,
            here=str(scope["path"]),
            signed_in=caller is not None and session_cookie(scope) is not None,
            **context,
        )
    )
    return HTMLResponse(text, status, PAGE_HEADERS)


def go_to(path: str) -> Response:
    """Sends the browser to a page after a form."""
    return Response(status_code=303, headers={"Location": path, **PAGE_HEADERS})


def caller_has(request: Request, role: Role) -> bool:
    """Whether the caller of a page has a role, beside the role that opens the page."""
    caller: Caller = request.scope[CALLER_KEY]
    return role in caller.roles


def caller_id(request: Request) -> str:
    """The id of the key that opened the page."""
    caller: Caller = request.scope[CALLER_KEY]
    return caller.key_id


def services_of(request: Request) -> Services:
    """The services that the API uses."""
    services: Services = request.app.state.services
    return services


def lists_of(request: Request) -> RecommendFeature:
    """The services of lists."""
    feature: RecommendFeature = request.app.state.recommend
    return feature


def kept_figures(request: Request) -> KeptFigures:
    """The cache of figures that take long to count."""
    figures: KeptFigures = request.app.state.kept_figures
    return figures


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a posted form; the last value of a repeated field.

    Raises:
        BadRequest: the body is no form.
    """
    try:
        text = (await request.body()).decode("ascii")
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError:
        raise BadRequest("the form cannot be read", code="malformed_form") from None
    return dict(fields)


def local_path(path: str | None) -> str:
    """The next path that a request names; ``ROOT`` for a path outside the dashboard."""
    inside = path is not None and (path == ROOT or path.startswith((f"{ROOT}/", f"{ROOT}?")))
    if not inside or path is None or any(ord(c) < 33 or c == "\\" for c in path):
        return ROOT
    return path


def error_page(scope: Scope, error: AppError) -> Response:
    """The answer to a failed request for a page."""
    if scope["path"] == "/":
        if b"text/html" in (header(scope, b"accept") or b""):
            return go_to(ROOT)
        return problem_of(error, scope.get(REQUEST_ID_KEY))
    if isinstance(error, Unauthorized):
        return _to_sign_in(scope)
    # A part of a page shows the error where its content would be.
    template = "error_part.html" if header(scope, b"hx-request") else "error.html"
    answer = _render(
        scope,
        template,
        error.status,
        {"error": error, "request_id": scope.get(REQUEST_ID_KEY, "")},
    )
    answer.headers.update(error.headers)
    return answer


def _to_sign_in(scope: Scope) -> Response:
    """The redirect to the sign-in page, which leads back to the present page.

    A form posts to the path of its own page, so the path of a post is the path of a page.
    """
    here = str(scope["path"])
    query = scope["query_string"].decode("latin-1")
    if query and scope["method"] in SAFE_METHODS:
        here = f"{here}?{query}"
    part = header(scope, b"hx-request")
    if part:
        current = urlsplit((header(scope, b"hx-current-url") or b"").decode("latin-1"))
        here = local_path(current.path + (f"?{current.query}" if current.query else ""))
    target = f"{SIGN_IN}?next={quote(here, safe='')}"
    if part:
        return Response(status_code=401, headers={"HX-Redirect": target, **PAGE_HEADERS})
    return go_to(target)


class PageRoute(StrictQuery):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with errors turned into pages."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part)[:100] for part in first["loc"])
                return error_page(request.scope, Unprocessable(f"{where}: {first['msg'][:300]}"))
            except AppError as error:
                return error_page(request.scope, error)
            except AWAY as error:
                log.warning("the database did not answer", error=str(error).partition("\n")[0])
                away = Unavailable(
                    "the database does not answer; try again", code="database_unavailable"
                )
                return error_page(request.scope, away)

        return handle
