"""Access rules of routes: role, body limit and concurrency class, declared at the endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import quote, quote_from_bytes

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

ACCESS_KEY = "ncr.access"
"""Key of the ASGI scope that holds the `RouteAccess` of a request."""

CALLER_KEY = "ncr.caller"
"""Key of the ASGI scope that holds the `app.core.security.Caller` of a request with a role."""

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))

_ATTRIBUTE = "route_access"
# Characters that may stay unencoded in a path. `%` is one: what is encoded stays encoded.
_PATH_SAFE = "/%:@!$&'()*+,;=-._~"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Role(StrEnum):
    """A permission of an API key. A route declares one role, never `READ` or `INGEST`."""

    RECOMMEND = "recommend"
    """Lists, comparisons, questions, descriptions of items, and the documentation."""
    HISTORY = "history"
    """The events of every user."""
    METRICS = "metrics"
    """Metrics for monitoring."""
    EVENTS = "events"
    """Writing events and preferences of every user."""
    DELETE = "delete"
    """Deleting events."""
    CATALOG = "catalog"
    """Writing items."""
    ERASE = "erase"
    """Erasing users."""
    TOKENS = "tokens"
    """Signing tokens for users."""
    READ = "read"
    """The bundle of `recommend`, `history` and `metrics`."""
    INGEST = "ingest"
    """The bundle of `events`, `delete` and `catalog`."""
    ADMIN = "admin"
    """The bundle of all roles. Only `admin` opens trainings, jobs, models and trials."""


BUNDLES: Mapping[Role, frozenset[Role]] = {
    Role.READ: frozenset((Role.RECOMMEND, Role.HISTORY, Role.METRICS)),
    Role.INGEST: frozenset((Role.EVENTS, Role.DELETE, Role.CATALOG)),
    Role.ADMIN: frozenset(Role),
}
"""The roles that a bundle consists of."""

_NOT_AUDITED = BUNDLES[Role.READ] | {None}


@dataclass(frozen=True, slots=True)
class RouteAccess:
    """The rules that middleware applies to a request before its endpoint runs."""

    role: Role | None
    """The role that the API key needs. None: public, no key is needed."""
    max_body_bytes: int | None = None
    """Size limit of the body. None: the setting `NCR_MAX_BODY_BYTES`."""
    streamed: bool = False
    """Whether the route accepts streamed bodies: NDJSON, or CSV for a page. A streamed body has no
    size limit."""
    concurrency: str | None = None
    """The concurrency class, whose requests share one limit. None: no limit."""
    for_tokens: bool = False
    """Whether a user's token opens the route. The endpoint then calls `check_user`."""
    page: bool = False
    """Whether the route is for a browser. A session opens such a route, and its errors are pages.
    The route accepts forms only from pages of its own origin."""
    cached: bool = False
    """Whether the answer never changes and is the same for all callers. The endpoint sets the
    header `Cache-Control` itself."""

    @property
    def audited(self) -> bool:
        """Whether the log names the key of a request: true for writes and for `ADMIN` routes."""
        return self.role not in _NOT_AUDITED


def access(
    role: Role | None,
    *,
    max_body_bytes: int | None = None,
    streamed: bool = False,
    concurrency: str | None = None,
    for_tokens: bool = False,
    page: bool = False,
    cached: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Declare the rules of a route. Place it below the router's decorator.

    Args:
        role: see `RouteAccess.role`.
        max_body_bytes: see `RouteAccess.max_body_bytes`.
        streamed: see `RouteAccess.streamed`.
        concurrency: see `RouteAccess.concurrency`.
        for_tokens: see `RouteAccess.for_tokens`.
        page: see `RouteAccess.page`.
        cached: see `RouteAccess.cached`.
    """
    rules = RouteAccess(role, max_body_bytes, streamed, concurrency, for_tokens, page, cached)

    def declare(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)[_ATTRIBUTE] = rules
        return endpoint

    return declare


def declared_access(route: BaseRoute) -> RouteAccess | None:
    """The rules declared at a route's endpoint; None if there are none."""
    return getattr(getattr(route, "endpoint", None), _ATTRIBUTE, None)


class AccessTable:
    """Finds the rules of a request by one regular expression for each HTTP method.

    The framework routes a request only after the middleware. The table joins the patterns that the
    framework compiled, in the order of the routes, so that both choose the same route.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._access: dict[str, RouteAccess] = {}
        self._paths: dict[str, tuple[re.Pattern[str], set[str]]] = {}
        self._areas: dict[str, list[Role | None]] = {}
        alternatives: dict[str, list[str]] = {}
        for route in routes:
            rules = declared_access(route)
            if rules is None:
                continue
            pattern: re.Pattern[str] = getattr(route, "path_regex")  # noqa: B009 - not of the base
            path: str = getattr(route, "path")  # noqa: B009
            for method in getattr(route, "methods"):  # noqa: B009
                group = f"r{len(self._access)}"
                self._access[group] = rules
                # Groups of parameters lose their names, which may occur once in an expression.
                alternative = re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern)
                alternatives.setdefault(method, []).append(f"(?P<{group}>{alternative})")
                self._paths.setdefault(path, (pattern, set()))[1].add(method)
            self._areas.setdefault(_area(path), []).append(rules.role)
        self._patterns = {
            method: re.compile("|".join(parts)) for method, parts in alternatives.items()
        }

    def find(self, method: str, path: str) -> RouteAccess:
        """The rules of a request, also for paths and methods without a declared route."""
        pattern = self._patterns.get(method)
        match = None if pattern is None else pattern.match(path)
        if match is None or match.lastgroup is None:
            return self._undeclared(method, path)
        return self._access[match.lastgroup]

    def allowed_methods(self, path: str) -> list[str]:
        """The methods of a path, sorted. The framework names only the methods of the first route.

        As in OpenAPI, a path without parameters has precedence over a path with parameters.
        """
        by_parameters = sorted(self._paths.items(), key=lambda entry: entry[0].count("{"))
        for _, (pattern, methods) in by_parameters:
            if pattern.match(path):
                return sorted(methods)
        return []

    def _undeclared(self, method: str, path: str) -> RouteAccess:
        """Rules of the documentation's pages, of wrong methods, and of paths that do not exist.

        The role follows the routes with the same first segment. If no route has that segment, reads
        need `RECOMMEND` and writes `ADMIN`.
        """
        same_path = [
            self.find(allowed, path)
            for pattern, methods in self._paths.values()
            if pattern.match(path)
            for allowed in methods
        ]
        streamed = any(rules.streamed for rules in same_path)
        if same_path and all(rules.role is None for rules in same_path):
            return RouteAccess(None, streamed=streamed)
        roles = self._areas.get(_area(path), [])
        if method in SAFE_METHODS:
            role = Role.ADMIN if set(roles) == {Role.ADMIN} else Role.RECOMMEND
        else:
            writing = [role for role in roles if role not in BUNDLES[Role.READ]]
            ingested = writing and BUNDLES[Role.INGEST].issuperset(writing)
            role = (writing[0] if ingested else None) or Role.ADMIN
        return RouteAccess(role, streamed=streamed)


def _area(path: str) -> str:
    """The first segment of a path."""
    return path.lstrip("/").partition("/")[0]


class ResolveRoute:
    """Outermost middleware: sets the path for routing, and finds the rules of the route.

    The path keeps the client's percent-encoding, so that an id with `%2F` is one segment.
    """

    def __init__(self, app: ASGIApp, *, table: AccessTable) -> None:
        self.app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Resolve the route of the request, and pass it on."""
        if scope["type"] == "http":
            raw = scope.get("raw_path")
            if raw:
                # Some servers leave the query in; a client may send UTF-8 without encoding it.
                path = quote_from_bytes(raw.partition(b"?")[0], safe=_PATH_SAFE)
            else:
                path = quote(scope["path"], safe=_PATH_SAFE.replace("%", ""), errors="replace")
            scope["path"] = path
            scope[ACCESS_KEY] = self._table.find(scope["method"], path)
        await self.app(scope, receive, send)
