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
    """What an API key permits. A route declares one that is not a bundle."""

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
    """The bundle of everything; alone it opens trainings, jobs, models and trials."""


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
    """Whether the route accepts NDJSON, or as a page CSV, which it reads in pieces and which has no
    size limit."""
    concurrency: str | None = None
    """The concurrency class, whose requests share one limit. None: no limit."""
    for_tokens: bool = False
    """Whether a user's token opens the route; its endpoint calls `check_user`."""
    page: bool = False
    """Whether the route is for a browser: a session opens it, it takes forms, from pages of this
    origin only, and its errors are pages."""
    cached: bool = False
    """Whether the answer is the same for everybody and for ever, and says so itself."""

    @property
    def audited(self) -> bool:
        """Whether the log says which key sent a request: of writes, and of `ADMIN` routes."""
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
    """Finds the rules of a request. One regular expression a method, in the order of the routes.

    The routing of the framework comes after the middleware, and is not repeated here: the patterns
    are those that the framework compiled, so that both choose the same route.
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
        """The rules of a request, also of one that no declared route takes."""
        pattern = self._patterns.get(method)
        match = None if pattern is None else pattern.match(path)
        if match is None or match.lastgroup is None:
            return self._undeclared(method, path)
        return self._access[match.lastgroup]

    def allowed_methods(self, path: str) -> list[str]:
        """The methods of a path, sorted; the framework names those of its first route only.

        As in OpenAPI, a path without parameters goes before one with them that matches too.
        """
        by_parameters = sorted(self._paths.items(), key=lambda entry: entry[0].count("{"))
        for _, (pattern, methods) in by_parameters:
            if pattern.match(path):
                return sorted(methods)
        return []

    def _undeclared(self, method: str, path: str) -> RouteAccess:
        """Rules of the documentation's pages, of wrong methods, and of paths that do not exist.

        The role follows the routes with the same first segment. Without any, reading needs
        `RECOMMEND` and everything else `ADMIN`.
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
    """Outermost middleware: sets the path to route on, and looks up the rules of its route.

    The path stays percent-encoded as it was sent, so that an id with `%2F` in it is one segment.
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
