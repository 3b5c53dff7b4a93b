"""Access control: API keys with roles, rate limits, protection of a service without keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Protocol
from urllib.parse import urlsplit

from cachetools import LRUCache
from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from app.core.access import ACCESS_KEY, CALLER_KEY, SAFE_METHODS, Role, RouteAccess
from app.core.errors import (
    Forbidden,
    SettingsError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from app.core.logging import get_logger
from app.core.middleware import RELEASE_KEY, header

if TYPE_CHECKING:
    from app.core.settings import Settings

log = get_logger(__name__)

RATE_LIMIT_HEADERS = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
MAX_CALLERS = 10_000  # with a token bucket in memory
TOKEN_PREFIX = b"ncrt_"  # a bearer token that does not begin so is a key
MAX_WRONG_KEYS = 100
"""The number of wrong keys that an address may send at once. Then the rate is
`WRONG_KEYS_PER_SECOND`."""
WRONG_KEYS_PER_SECOND = 1.0
STRANGERS_PER_SECOND = 100.0
STRANGERS_WAIT_SECONDS = 0.5
SESSION_COOKIE = b"ncr_session"
_PROXY_HEADERS = frozenset((b"forwarded", b"via", b"x-real-ip"))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    key_id: str
    """The id of a key in the database, or the id of `ADMIN` or `LOCAL`."""
    roles: frozenset[Role]
    rate: float | None = None
    """Requests a second; None: as in the settings."""
    burst: int | None = None
    user: str | None = None
    """The only user whom a token is for; None for a key."""

    @property
    def bucket(self) -> str:
        """The name of the token bucket. A key has a bucket, and so has each user of its tokens."""
        return self.key_id if self.user is None else f"{self.key_id}:{self.user}"


class Keys(Protocol):
    """The API keys in the database."""

    async def any(self) -> bool:
        """Whether the database has a key, revoked keys included."""

    async def identify(self, key: bytes) -> Caller | None:
        """The caller that a key belongs to; None for an unknown or revoked key."""

    async def identify_token(self, token: bytes) -> Caller | None:
        """The caller that a token stands for; None for a false, expired or revoked token."""

    async def identify_session(self, session: bytes, admin: bytes | None) -> Caller | None:
        """The caller of a browser's session; None for a false, expired or revoked session.

        ``admin`` is the digest of `NCR_ADMIN_KEY`.
        """


class NoKeys:
    """The keys of a service that has not opened its database."""

    async def any(self) -> bool:
        """Return False: no key is known yet."""
        return False

    async def identify(self, key: bytes) -> Caller | None:
        """Return None: no key is known yet."""
        return None

    async def identify_token(self, token: bytes) -> Caller | None:
        """Return None: no key is known yet."""
        return None

    async def identify_session(self, session: bytes, admin: bytes | None) -> Caller | None:
        """Return None: no key is known yet."""
        return None


def caller_of(request: Request) -> Caller:
    """The caller of a request to a route that needs a role."""
    caller: Caller = request.scope[CALLER_KEY]
    return caller


async def _caller_id(request: Request) -> str:
    return caller_of(request).key_id


CallerId = Annotated[str, Depends(_caller_id)]


def role_missing(role: Role) -> Forbidden:
    """The error for a key without a role."""
    return Forbidden(
        f"this API key does not have the required role {role.value!r}", code="role_missing"
    )


def check_user(caller: Caller, user: object) -> None:
    """Refuse a request about a user other than the user of the token.

    Raises:
        Forbidden: the caller sent a token for another user.
    """
    if caller.user is not None and user != caller.user:
        raise Forbidden("this token is for another user", code="other_user")


ADMIN = Caller("admin", frozenset(Role))
LOCAL = Caller("local", frozenset(Role))


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """The outcome of taking a token."""

    allowed: bool
    remaining: int
    """Requests that the bucket still permits now."""
    reset: float
    """Seconds until the bucket is full again."""
    retry: float
    """Seconds until the next request is permitted; 0 if one is permitted now."""


class TokenBuckets(Protocol):
    """Token buckets, which hold ``burst`` tokens and gain ``rate`` tokens a second."""

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant | None:
        """Take a token from a caller's bucket; None if the buckets are unavailable."""


class LocalTokenBuckets:
    """Token buckets in the memory of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # An evicted caller begins with a full bucket, like a caller after a long pause.
        self._buckets: LRUCache[str, tuple[float, float]] = LRUCache(MAX_CALLERS)

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant:
        """Take a token from a caller's bucket."""
        now = self._clock()
        tokens, updated = self._buckets.get(caller, (float(burst), now))
        tokens = min(float(burst), tokens + (now - updated) * rate)
        allowed = tokens >= 1
        if allowed:
            tokens -= 1
        self._buckets[caller] = tokens, now
        return token_grant(allowed, tokens, rate, burst)

    def set(self, caller: str, tokens: int) -> None:
        """Replace the number of tokens in a caller's bucket."""
        self._buckets[caller] = float(tokens), self._clock()


def token_grant(allowed: bool, tokens: float, rate: float, burst: int) -> TokenGrant:
    """The outcome for a bucket with ``tokens`` tokens left."""
    retry = 0.0 if tokens >= 1 else (1 - tokens) / rate
    return TokenGrant(allowed, math.floor(tokens), max(0.0, burst - tokens) / rate, retry)


class RateLimiter:
    """Uses the buckets that servers share, or local buckets while the shared ones are unavailable.

    A local bucket begins with the tokens that the shared bucket had left.
    """

    def __init__(self, rate: float, burst: int, shared: TokenBuckets | None = None) -> None:
        self._rate = rate
        self._burst = burst
        self._shared = shared
        self._local = LocalTokenBuckets()

    def bounds(self, rate: float | None, burst: int | None) -> tuple[float, int]:
        """A caller's own rate and burst, else those of the settings. A rate of 0 is no limit."""
        if burst is None and rate is None:
            burst = self._burst or None
        rate = self._rate if rate is None else rate
        return rate, max(1, math.ceil(2 * rate)) if burst is None else burst

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant:
        """Take a token from a caller's bucket."""
        if self._shared is not None:
            grant = await self._shared.take(caller, rate, burst)
            if grant is not None:
                self._local.set(caller, grant.remaining)
                return grant
        return await self._local.take(caller, rate, burst)


class Strangers:
    """Slows down clients without a valid key: each address gets 100 answers per second at once.

    Further requests wait for their turn, for at most 0.5 s. Behind a proxy all clients have the
    proxy's address, and the probe of a load balancer may be among them. The server therefore
    refuses no client, and endless requests for readiness cost the server little time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_turns: LRUCache[str, float] = LRUCache(MAX_CALLERS)

    async def wait(self, address: str) -> None:
        """Wait for the request's turn, for at most ``STRANGERS_WAIT_SECONDS``."""
        now = self._clock()
        # Up to a second's requests may come at once.
        turn = max(self._last_turns.get(address, now), now) + 1.0 / STRANGERS_PER_SECOND
        turn = self._last_turns[address] = min(turn, now + 1.0 + STRANGERS_WAIT_SECONDS)
        if turn > now + 1.0:
            await asyncio.sleep(turn - now - 1.0)


class RefusalLog:
    """Warns of refused requests: 1 line per minute for an address, 60 lines per minute for all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = LocalTokenBuckets(clock)

    async def add(self, address: str, code: str) -> None:
        """Log a refusal, without the key and the path, which may hold a user's id."""
        for bucket, per_minute in ((f"address {address}", 1), ("all", 60)):
            if not (await self._buckets.take(bucket, per_minute / 60, per_minute)).allowed:
                return
        log.warning("request refused", address=address, code=code)


class WrongKeys:
    """Slows down guesses at `NCR_ADMIN_KEY` by the wrong keys of each address at this server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets = LocalTokenBuckets(clock)
        self._refused_until: LRUCache[str, float] = LRUCache(MAX_CALLERS)

    def wait(self, address: str) -> float:
        """Seconds until the address may guess again; 0 if it may now."""
        if not self._refused_until:
            return 0.0
        return max(0.0, self._refused_until.get(address, 0.0) - self._clock())

    async def count(self, address: str) -> None:
        """Count a wrong key."""
        grant = await self._buckets.take(address, WRONG_KEYS_PER_SECOND, MAX_WRONG_KEYS)
        if grant.retry:
            self._refused_until[address] = self._clock() + grant.retry
            log.warning("too many wrong keys", address=address)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is certain to be this machine."""
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
    """Refuse to listen beyond this machine without a key.

    Raises:
        SettingsError: the host is no loopback address, no key exists, and
            ``settings.open_to_the_network`` is false.
    """
    if settings.admin_key is None and not has_keys and not is_loopback(host):
        if settings.open_to_the_network:
            return
        raise SettingsError(
            f"{host or 'all addresses'}: without a key, the server binds only loopback "
            "addresses; set NCR_ADMIN_KEY, create a key with `ncr keys create`, or use --host "
            "127.0.0.1"
        )


class Authentication:
    """Identifies the caller of a request by a key, a token or a session, or as `LOCAL`.

    Args:
        settings: the administrator's key, and whether a service without keys is open to others.
        keys: returns the keys in the database.
    """

    def __init__(self, settings: Settings, keys: Callable[[], Keys]) -> None:
        key = settings.admin_key
        self.admin = None if key is None else _digest(key.get_secret_value().encode("utf-8"))
        """The digest of the administrator's key; None without one."""
        self._open = settings.open_to_the_network
        self._keys = keys
        self._wrong_keys = WrongKeys()

    async def caller(self, scope: Scope) -> Caller:
        """The caller of a request; `LOCAL` for a service without keys.

        Raises:
            Unauthorized: the key, token or session is not valid, or there is none.
            Forbidden: no keys exist, and the request does not come from this machine.
            TooManyRequests: too many wrong keys came from this address.
        """
        key = header(scope, b"x-api-key")
        bearer = _bearer(scope) if key is None else None
        token = None
        if bearer is not None:
            key, token = (None, bearer) if bearer.startswith(TOKEN_PREFIX) else (bearer, None)
        if key is not None:
            return await self.caller_of_key(scope, key, is_bearer=bearer is not None)
        keys = self._keys()
        caller = None
        if token is not None:
            caller = await keys.identify_token(token)
        elif scope[ACCESS_KEY].page and (session := session_cookie(scope)) is not None:
            caller = await keys.identify_session(session, self.admin)
        if caller is not None:
            return caller
        if await self._needs_no_key(scope):
            return LOCAL
        raise _false_bearer() if token is not None else _no_key()

    async def caller_of_key(self, scope: Scope, key: bytes, *, is_bearer: bool = False) -> Caller:
        """The caller that a key belongs to. Raises as `caller`."""
        address, wait = _address(scope), 0.0
        if self.admin is not None:
            wait = self._wrong_keys.wait(address)
            # Digests have equal lengths: the comparison does not reveal the key's length.
            if not wait and hmac.compare_digest(_digest(key), self.admin):
                return ADMIN
        caller = await self._keys().identify(key)
        if caller is not None:
            return caller
        if await self._needs_no_key(scope):
            return LOCAL
        # Only the administrator's key may be worth a guess, as those of the database are random. It
        # was not compared while its address has to wait.
        if wait:
            raise TooManyRequests(
                "too many wrong keys came from this address",
                code="too_many_wrong_keys",
                headers={"Retry-After": str(math.ceil(wait))},
            )
        if self.admin is not None:
            await self._wrong_keys.count(address)
        raise _false_bearer() if is_bearer else _no_key()

    async def _needs_no_key(self, scope: Scope) -> bool:
        if self.admin is not None or await self._keys().any():
            return False
        if not self._open:
            _check_local(scope)
        return True


class Security:
    """Middleware that checks keys, roles and rate limits, also for paths that do not exist.

    Args:
        app: the application below.
        authentication: identifies the caller of a request.
        limiter: returns the rate limiter.
        on_refused: called with the error code of each refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authentication: Authentication,
        limiter: Callable[[], RateLimiter],
        on_refused: Callable[[str], None],
    ) -> None:
        self.app = app
        self._authentication = authentication
        self._limiter = limiter
        self._on_refused = on_refused
        self._refusals = RefusalLog()
        self._public, self._strangers = Strangers(), Strangers()  # probes, and the others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it is refused."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        access: RouteAccess = scope[ACCESS_KEY]
        role = access.role
        if access.page:
            _check_origin(scope)
        if role is None:
            await self._public.wait(_address(scope))
            await self.app(scope, receive, send)
            return
        try:
            caller = scope[CALLER_KEY] = await self._authentication.caller(scope)
            if role not in caller.roles:
                raise role_missing(role)
            if caller.user is not None and not access.for_tokens:
                raise Forbidden("a token does not open this route", code="token_not_enough")
            limiter = self._limiter()
            rate, burst = limiter.bounds(caller.rate, caller.burst)
            if rate:
                grant = await limiter.take(caller.bucket, rate, burst)
                if not grant.allowed:
                    raise _too_many(grant, burst)
                send = _with_limits(send, grant, burst)
        except SQLAlchemyError:
            raise Unavailable(
                "the database does not answer; try again", code="database_unavailable"
            ) from None
        except (Unauthorized, Forbidden, TooManyRequests) as error:
            self._on_refused(error.code)
            if not isinstance(error, TooManyRequests):
                await self._refusals.add(_address(scope), error.code)
            if isinstance(error, Unauthorized):
                if RELEASE_KEY in scope:
                    scope[RELEASE_KEY]()  # those with a key need not wait for strangers
                await self._strangers.wait(_address(scope))
            raise
        if not access.audited:
            await self.app(scope, receive, send)
            return
        # Every log line of this request contains the key's id.
        with bound_contextvars(key_id=caller.key_id):
            await self.app(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _false_bearer() -> Unauthorized:
    return Unauthorized(
        "the token or key is not valid: the signature is wrong, the token has expired, or its "
        "key is revoked",
        code="invalid_token",
        headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
    )


def _no_key() -> Unauthorized:
    return Unauthorized("send a valid key in the X-API-Key header, or as a bearer token")


def session_cookie(scope: Scope) -> bytes | None:
    """The session that a browser sends with a request for a page."""
    for name, value in scope["headers"]:
        if name == b"cookie":
            for part in bytes(value).split(b";"):
                cookie, _, session = part.strip().partition(b"=")
                if cookie == SESSION_COOKIE:
                    return session
    return None


def _check_origin(scope: Scope) -> None:
    """Refuse a request that a page of another origin sends.

    A browser names the origin in `Sec-Fetch-Site` or in `Origin`. Behind a proxy that passes on
    another host, `Sec-Fetch-Site` is still right.
    """
    if scope["method"] in SAFE_METHODS:
        return
    if header(scope, b"sec-fetch-site") == b"same-origin":
        return
    origin, host = header(scope, b"origin"), header(scope, b"host")
    try:
        sent_from = "" if origin is None else urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        sent_from = ""
    if not sent_from or host is None or sent_from.lower() != host.decode("latin-1").lower():
        raise Forbidden("a page of another origin sent this form", code="other_origin")


def _address(scope: Scope) -> str:
    """The address by which the server counts requests; behind a proxy, the proxy's address."""
    return sender(str((scope.get("client") or ("",))[0]))


@lru_cache(MAX_CALLERS)
def sender(address: str) -> str:
    """Return the /64 network of an IPv6 address, and any other address unchanged.

    A client with a /64 network can send each request from another address.
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    if parsed.is_loopback:
        return address
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _headers(grant: TokenGrant, burst: int) -> dict[str, str]:
    values = (burst, grant.remaining, math.ceil(grant.reset))
    return dict(zip(RATE_LIMIT_HEADERS, map(str, values), strict=True))


def _too_many(grant: TokenGrant, burst: int) -> TooManyRequests:
    error = TooManyRequests("this key has exceeded its rate limit")
    error.headers.update(_headers(grant, burst))
    error.headers["Retry-After"] = str(max(1, math.ceil(grant.retry)))
    return error


def _with_limits(send: Send, grant: TokenGrant, burst: int) -> Callable[[Message], Awaitable[None]]:
    added = [
        (name.lower().encode(), value.encode()) for name, value in _headers(grant, burst).items()
    ]

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_with_limits


def _check_local(scope: Scope) -> None:
    """Refuse requests of a web page in a browser on this machine, and requests through a proxy."""
    # nginx speaks HTTP/1.0 to the server behind it, and adds no header, unless it is told to.
    if scope.get("http_version") == "1.0" or any(
        name in _PROXY_HEADERS or name.startswith(b"x-forwarded-") for name, _ in scope["headers"]
    ):
        raise Forbidden(
            "this request came through a proxy, and without a key every client of the proxy "
            "can read and delete all data: create a key with `ncr keys create NAME` or set "
            "NCR_ADMIN_KEY",
            code="proxy_without_key",
        )
    host = header(scope, b"host")
    # A page can make its own name resolve to 127.0.0.1; the Host header shows it.
    if host is not None and not _is_local_authority(host):
        raise Forbidden("without a key, the server accepts only requests to a loopback host")
    if scope["method"] in SAFE_METHODS:
        return
    origin = header(scope, b"origin")
    if origin is not None:
        try:
            origin_host = urlsplit(origin.decode("latin-1")).netloc
        except ValueError:
            origin_host = ""
        if not _is_local_authority(origin_host.encode("latin-1")):
            raise Forbidden("without a key, the server refuses requests from another origin")


def _is_local_authority(authority: bytes) -> bool:
    try:
        host = urlsplit("//" + authority.decode("latin-1")).hostname
    except ValueError:
        return False
    return bool(host) and is_loopback(str(host))
