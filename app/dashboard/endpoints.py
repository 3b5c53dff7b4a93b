"""Routes that every page needs: signing in and out, static files, and unknown pages."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app.core.access import CALLER_KEY, Role, access
from app.core.errors import NotFound, TooManyRequests, Unauthorized
from app.core.middleware import header
from app.core.security import LOCAL, SESSION_COOKIE, Authentication
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    MEDIA_TYPES,
    MENU,
    PAGE_HEADERS,
    ROOT,
    SIGN_IN,
    PageRoute,
    go_to,
    local_path,
    read_form,
    render,
    services_of,
    static_file,
)
from app.keys.sessions import SESSION_SECONDS

router = APIRouter(route_class=PageRoute, include_in_schema=False)
last_router = APIRouter(route_class=PageRoute, include_in_schema=False)
"""The router behind the routers of all pages."""

Next = Annotated[str, Query(max_length=4096)]


@router.get("/")
@access(Role.RECOMMEND, page=True)
async def root(request: Request) -> Response:
    """Redirects browsers to the dashboard; 404 for other clients."""
    if b"text/html" not in (header(request.scope, b"accept") or b""):
        raise HTTPException(404)
    return go_to(ROOT)


@router.get(SIGN_IN)
@access(None, page=True)
async def sign_in_page(request: Request, next: Next = ROOT) -> Response:  # noqa: A002
    """The form that takes an API key."""
    return render(request, "sign_in.html", next=local_path(next), problem=None)


@router.post(SIGN_IN)
@access(None, page=True, max_body_bytes=MAX_FORM_BYTES)
async def sign_in(request: Request) -> Response:
    """Starts a session for a valid key, and redirects to the page that needed the key."""
    form = await read_form(request)
    following = local_path(form.get("next"))
    authentication: Authentication = request.app.state.authentication
    try:
        key = form.get("key", "").strip().encode()
        caller = await authentication.caller_of_key(request.scope, key)
    except (Unauthorized, TooManyRequests) as error:
        problem = "This is not a valid key."
        if isinstance(error, TooManyRequests):
            problem = "Too many wrong keys came from this address. Wait a moment."
        return render(request, "sign_in.html", error.status, next=following, problem=problem)
    if not any(entry.role in caller.roles for entry in MENU):
        problem = "This key has none of the roles that pages need."
        return render(request, "sign_in.html", 403, next=following, problem=problem)
    request.scope[CALLER_KEY] = caller
    if following == ROOT:  # the first page that the key opens
        following += next(entry.path for entry in MENU if entry.role in caller.roles)
    answer = go_to(following)
    session = await services_of(request).keys.sign_session(caller, authentication.admin)
    if session is not None and caller is not LOCAL:
        answer.set_cookie(
            SESSION_COOKIE.decode(),
            session,
            max_age=SESSION_SECONDS,
            path=ROOT,
            secure=_is_secure(request),
            httponly=True,
            samesite="strict",
        )
    return answer


@router.post(f"{ROOT}/sign-out")
@access(None, page=True, max_body_bytes=MAX_FORM_BYTES)
async def sign_out(request: Request) -> Response:
    """Deletes the cookie of the session."""
    answer = go_to(SIGN_IN)
    answer.delete_cookie(
        SESSION_COOKIE.decode(),
        path=ROOT,
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )
    return answer


def _is_secure(request: Request) -> bool:
    """Whether the browser reached the service by TLS, here or at a proxy."""
    proxied = header(request.scope, b"x-forwarded-proto") or b""
    return request.url.scheme == "https" or proxied.split(b",")[0].strip() == b"https"


@router.get(f"{ROOT}/static/{{digest}}/{{name:path}}")
@access(None, cached=True)
async def static(request: Request, digest: str, name: str) -> Response:
    """A file that pages use. The path changes with the content, so browsers keep the file."""
    found = static_file(name)
    if found is None or found[2] != digest:
        raise HTTPException(404, headers={"Cache-Control": "no-store"})
    content, compressed, _ = found
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Vary": "Accept-Encoding",
        **PAGE_HEADERS,
    }
    if b"gzip" in (header(request.scope, b"accept-encoding") or b""):
        content, headers["Content-Encoding"] = compressed, "gzip"
    return Response(content, 200, headers, MEDIA_TYPES[name.rpartition(".")[2]])


@last_router.get(f"{ROOT}/{{rest:path}}")
@access(Role.RECOMMEND, page=True)
async def nothing_here(rest: str) -> Response:
    """Answers 404 for an unknown page."""
    raise NotFound("the page does not exist", code="unknown_page")
