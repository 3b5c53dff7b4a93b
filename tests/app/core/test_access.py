"""Rules of routes: every route declares them, and the middleware finds those of the right route."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from app.core.access import (
    BUNDLES,
    SAFE_METHODS,
    AccessTable,
    ResolveRoute,
    Role,
    access,
    declared_access,
)
from app.core.errors import install_error_handlers
from app.core.middleware import AnswerRefusals
from app.core.requests import BodyLimit, StrictQuery
from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import client_of

CONCURRENCY_CLASSES = {None, "recommend"}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """The application, not started: nothing but its routes."""
    return create_app(load_settings(data_dir=tmp_path_factory.mktemp("access")))


@pytest.fixture(scope="module")
def table(application: FastAPI) -> AccessTable:
    table: AccessTable = application.state.access
    return table


def test_every_route_declares_role_body_limit_and_concurrency_class(application: FastAPI) -> None:
    documented = [
        route
        for route in application.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]
    assert len(documented) > 30
    for route in documented:
        rules = declared_access(route)
        assert rules is not None, route.path
        assert rules.role not in (Role.READ, Role.INGEST), f"{route.path} declares a bundle"
        assert rules.max_body_bytes is None or rules.max_body_bytes > 0, route.path
        assert rules.concurrency in CONCURRENCY_CLASSES, route.path
    assert {route.path for route in documented if declared_access(route).role is None} == {  # type: ignore[union-attr]
        "/health/live",
        "/health/ready",
    }


def test_every_route_but_those_for_probes_knows_its_query_parameters(application: FastAPI) -> None:
    lenient = {
        route.path
        for route in application.routes
        if isinstance(route, APIRoute)
        and route.include_in_schema
        and not isinstance(route, StrictQuery)
    }
    # Whatever watches over a service appends parameters of its own.
    assert lenient == {"/health/live", "/health/ready", "/metrics"}


@pytest.mark.parametrize(
    ("bundle", "routes"),
    [
        (
            Role.READ,
            {
                *(
                    "GET /recommend/{user}",
                    "POST /recommend",
                    "POST /recommend/batch",
                    "POST /rerank",
                    "POST /compare",
                ),
                *("GET /items", "GET /items/{item}", "GET /items/{item}/similar", "GET /metrics"),
                *("GET /users/{user}/events", "GET /users/{user}/questions"),
                *("GET /users", "GET /users/{user}", "GET /popular", "GET /trending"),
            },
        ),
        (
            Role.INGEST,
            {
                *("POST /events", "DELETE /events/{event_id}", "POST /preferences", "POST /items"),
                *("POST /users", "PUT /users/{user}", "PATCH /users/{user}"),
                "POST /users/{user}/merge",
                *("PUT /items/{item}", "PATCH /items/{item}", "DELETE /items/{item}"),
            },
        ),
    ],
)
def test_a_bundle_opens_the_routes_that_keys_with_it_were_given_for(
    application: FastAPI, bundle: Role, routes: set[str]
) -> None:
    opened = {
        f"{method} {route.path}"
        for route in application.routes
        if isinstance(route, APIRoute) and (rules := declared_access(route)) is not None
        for method in route.methods
        if rules.role in BUNDLES[bundle] and not rules.page
    }
    assert opened == routes


def test_undeclared_routes_come_after_all_declared_ones(application: FastAPI) -> None:
    """A declared route behind one that matches the same path would lend it its rules."""
    declared = [declared_access(route) is not None for route in application.routes]
    assert declared == sorted(declared, reverse=True)


@pytest.mark.parametrize(
    ("role", "requests"),
    [
        (None, ["GET /health/live", "GET /health/ready", "HEAD /health/live"]),
        (
            Role.RECOMMEND,
            [
                "GET /recommend/user-1",
                "GET /recommend/batch",
                "POST /recommend",
                "POST /recommend/batch",
                "POST /rerank",
                "POST /compare",
                "GET /items/a%2Fb/similar",
                "GET /popular",
                "GET /trending",
            ],
        ),
        (Role.HISTORY, ["GET /users/u/events", "GET /users", "GET /users/u"]),
        (Role.METRICS, ["GET /metrics"]),
        (
            Role.EVENTS,
            ["POST /events", "POST /preferences", "POST /users", "PUT /users/u", "PATCH /users/u"],
        ),
        (Role.DELETE, ["DELETE /events/e", "POST /users/u/merge"]),
        (Role.CATALOG, ["POST /items", "PUT /items/i", "PATCH /items/i", "DELETE /items/i"]),
        (Role.ERASE, ["DELETE /users/u"]),
        (Role.ADMIN, ["GET /admin/jobs", "POST /admin/train"]),
        # Requests that no route takes need a role, too.
        (
            Role.RECOMMEND,
            ["GET /docs", "GET /no/such/route", "OPTIONS /events", "HEAD /items", "GET /users/u/x"],
        ),
        (Role.CATALOG, ["BREW /items", "POST /items/i/similar"]),
        (Role.EVENTS, ["PUT /events/e"]),
        (
            Role.ADMIN,
            [
                "POST /something/new",
                "POST /rerank/x",
                "POST /compare/x",
                "POST /recommend/x",
                "POST /recommend/batch/x",
                "PATCH /users/u/x",
                "DELETE /metrics",
                "OPTIONS /admin/jobs",
                "GET /admin/nothing",
                "GET /admin",
            ],
        ),
    ],
)
def test_the_role_that_a_request_needs(
    table: AccessTable, role: Role | None, requests: list[str]
) -> None:
    for request in requests:
        method, path = request.split(" ")
        assert table.find(method, path).role is role, request


SEGMENTS = (
    *("recommend", "batch", "items", "similar", "events", "users", "questions", "preferences"),
    *("admin", "models", "rollback", "jobs", "trials", "train", "activate", "cancel", "health"),
    *("live", "metrics", "", "a/b", "/", "%", "é", "..", "a\nb", "rollback\n"),
)


@pytest.mark.slow
@given(
    st.sampled_from(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW")),
    st.lists(st.sampled_from(SEGMENTS) | st.text(max_size=5), max_size=5),
    st.booleans(),
)
def test_the_table_chooses_the_route_that_the_framework_chooses(
    application: FastAPI, table: AccessTable, method: str, segments: list[str], encoded: bool
) -> None:
    parts = [quote(part, safe="", errors="replace") if encoded else part for part in segments]
    path = "/" + "/".join(parts)
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}}
    matches = [(route, route.matches(dict(scope))[0]) for route in application.routes]
    chosen = next((route for route, match in matches if match is Match.FULL), None)
    rules = table.find(method, path)
    if chosen is not None and declared_access(chosen) is not None:
        assert rules is declared_access(chosen)
    else:
        assert rules.concurrency is None
        public = [route for route, match in matches if match is Match.PARTIAL]
        assert (rules.role is None) == bool(public and all(_is_public(route) for route in public))
        assert method in SAFE_METHODS or rules.role is not Role.RECOMMEND


def _is_public(route: object) -> bool:
    rules = declared_access(route)  # type: ignore[arg-type]
    return rules is not None and rules.role is None


@pytest.mark.anyio
async def test_a_route_may_declare_a_body_limit_of_its_own() -> None:
    small = FastAPI()

    @small.post("/small")
    @access(Role.EVENTS, max_body_bytes=10)
    async def endpoint() -> None:
        pass

    install_error_handlers(small)
    small.add_middleware(BodyLimit, max_bytes=2000)
    small.add_middleware(AnswerRefusals)
    small.add_middleware(ResolveRoute, table=AccessTable(small.routes))
    async with client_of(small) as client:
        for size, status in ((10, 200), (11, 413)):
            headers = {"content-type": "application/json"}
            response = await client.post("/small", content=b"1" * size, headers=headers)
            assert response.status_code == status
