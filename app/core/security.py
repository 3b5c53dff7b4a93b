"""Who may call: the key when one is configured, and what keeps an open loopback service safe."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import Forbidden, SettingsError, Unauthorized
from app.core.middleware import header

if TYPE_CHECKING:
    from app.core.settings import Settings

# The name that test clients call an application without a network by.
_TEST_HOST = "testserver"


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


def ensure_bindable(host: str, settings: Settings) -> None:
    """Refuse to listen beyond this machine without a key."""
    if settings.admin_key is None and not is_loopback(host):
        raise SettingsError(
            f"{host or 'all addresses'}: without a key only loopback is bound; "
            "set NCR_ADMIN_KEY or use --host 127.0.0.1"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Security:
    """Middleware, so that it also covers `/docs`, `/metrics` and routes that do not exist."""

    def __init__(self, app: ASGIApp, *, key: str | None) -> None:
        self.app = app
        self.digest = None if key is None else _digest(key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self.digest is None:
                _check_local(scope)
            elif not scope["path"].startswith("/health/"):
                given = header(scope, b"x-api-key")
                # Digests have one length, so that the comparison does not tell the key's.
                if given is None or not hmac.compare_digest(_digest(given), self.digest):
                    raise Unauthorized("send the key in the X-API-Key header")
        await self.app(scope, receive, send)


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
