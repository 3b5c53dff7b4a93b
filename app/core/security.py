"""Who may call, and for what: keys with roles, and what keeps an open loopback service safe."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.errors import (
    Forbidden,
    SettingsError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from app.core.limits import Limiter, Taken
from app.core.middleware import header
from app.core.roles import Role

if TYPE_CHECKING:
    from app.core.settings import Settings

# The name that test clients call an application without a network by.
_TEST_HOST = "testserver"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    key_id: str
    roles: frozenset[Role]
    rate: float | None = None
    """Requests a second; None: the service's setting."""
    burst: int | None = None


class Keys(Protocol):
    """The keys in the database."""

    async def any(self) -> bool: ...

    async def identify(self, key: bytes) -> Caller | None: ...


ADMIN = Caller("admin", frozenset(Role))
LOCAL = Caller("local", frozenset(Role))


def needed_role(method: str, path: str) -> Role:
    """What a request takes. What is not known to be harmless is an administrator's."""
    if path.startswith("/admin"):
        return Role.ADMIN
    if method in ("GET", "HEAD", "OPTIONS"):
        return Role.READ
    if method == "POST" and path in ("/recommend/batch", "/rerank", "/compare"):
        return Role.READ
    if path.startswith(("/events", "/items", "/preferences")):
        return Role.INGEST
    return Role.ADMIN


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    host = host.strip().lower().removeprefix("[").removesuffix("]").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # Another name may resolve to anything, and to something else tomorrow.
        return False
    return address.is_loopback


def ensure_bindable(host: str, settings: Settings, *, has_keys: bool = False) -> None:
    """Refuse to listen beyond this machine without a key."""
    if settings.admin_key is None and not has_keys and not is_loopback(host):
        if settings.open_to_the_network:
            return
        raise SettingsError(
            f"{host or 'all addresses'}: without a key only loopback is bound; set NCR_ADMIN_KEY, "
            "make a key with `ncr keys create`, or use --host 127.0.0.1"
        )


class Security:
    """Middleware, so that it also covers `/docs`, `/metrics` and routes that do not exist.

    ``keys`` gives the keys in the database, once it is there. ``on_refused`` is told the code of
    each refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        keys: Callable[[], Keys | None],
        limiter: Callable[[], Limiter],
        on_refused: Callable[[str], None],
    ) -> None:
        self.app = app
        key = settings.admin_key
        self._admin = None if key is None else _digest(key.get_secret_value().encode("utf-8"))
        self._open = settings.open_to_the_network
        self._keys = keys
        self._limiter = limiter
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/health/"):
            await self.app(scope, receive, send)
            return
        try:
            caller = await self._caller(scope)
            role = needed_role(scope["method"], scope["path"])
            if role not in caller.roles:
                raise Forbidden(f"this key has not the role {role.value!r}", code="role_missing")
            limiter = self._limiter()
            rate, burst = limiter.bounds(caller.rate, caller.burst)
            if rate:
                taken = await limiter.take(caller.key_id, rate, burst)
                if not taken.allowed:
                    raise _too_many(taken, burst)
                send = _with_limits(send, taken, burst)
        except SQLAlchemyError:
            raise Unavailable(
                "the database does not answer; try again", code="database_unavailable"
            ) from None
        except (Unauthorized, Forbidden, TooManyRequests) as error:
            self._on_refused(error.code)
            raise
        await self.app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        given = header(scope, b"x-api-key")
        # Digests have one length, so that the comparison does not tell the key's.
        if (
            given is not None
            and self._admin is not None
            and hmac.compare_digest(_digest(given), self._admin)
        ):
            return ADMIN
        keys = self._keys()
        if given is not None and keys is not None:
            caller = await keys.identify(given)
            if caller is not None:
                return caller
        if self._admin is None and (keys is None or not await keys.any()):
            if not self._open:
                _check_local(scope)
            return LOCAL
        raise Unauthorized("send a valid key in the X-API-Key header")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _headers(taken: Taken, burst: int) -> dict[str, str]:
    return {
        "RateLimit-Limit": str(burst),
        "RateLimit-Remaining": str(taken.remaining),
        "RateLimit-Reset": str(math.ceil(taken.reset)),
    }


def _too_many(taken: Taken, burst: int) -> TooManyRequests:
    error = TooManyRequests("this key has sent more requests than it may")
    error.headers.update(_headers(taken, burst))
    error.headers["Retry-After"] = str(max(1, math.ceil(taken.retry)))
    return error


def _with_limits(send: Send, taken: Taken, burst: int) -> Callable[[Message], Awaitable[None]]:
    added = [
        (name.lower().encode(), value.encode()) for name, value in _headers(taken, burst).items()
    ]

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_with_limits


def _check_local(scope: Scope) -> None:
    """Without a key a web page in the user's browser must not reach the service either."""
    host = header(scope, b"host")
    # A page can make its own name resolve to 127.0.0.1; the Host header tells on it.
    if host is not None and not _is_local_authority(host):
        raise Forbidden("without a key only requests to a loopback host are answered")
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return
    origin = header(scope, b"origin")
    if origin is not None:
        try:
            origin_host = urlsplit(origin.decode("latin-1")).netloc
        except ValueError:
            origin_host = ""
        if not _is_local_authority(origin_host.encode("latin-1")):
            raise Forbidden("without a key, requests from another origin are refused")


def _is_local_authority(authority: bytes) -> bool:
    try:
        host = urlsplit("//" + authority.decode("latin-1")).hostname
    except ValueError:
        return False
    return bool(host) and (host == _TEST_HOST or is_loopback(str(host)))
