"""Tokens: a user, roles and an expiry, signed by a server for clients without a key."""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

import orjson

from app.core.access import Role

TOKEN_ROLES = frozenset((Role.RECOMMEND, Role.EVENTS))
"""The roles that a token can have, for its own user only."""
MAX_TOKEN_SECONDS = 3600
CLOCK_SKEW_SECONDS = 5
"""The time after its expiry in which servers accept a token, as their clocks differ."""

# `ncrt_`, the id of the key, the claims in Base64, and their signature. A user's id of 256 control
# characters makes claims of 2,150 characters.
_TOKEN = re.compile(rb"(ncrt_([0-9a-f]{12})\.([A-Za-z0-9_-]{1,2200}))\.([A-Za-z0-9_-]{43})")


class TokenClaims(NamedTuple):
    """The content of a token."""

    user: str
    roles: frozenset[Role]
    expires_at: int
    """Seconds since 1970, UTC."""


def signing_key(secret: str, digest: str) -> bytes:
    """The key that signs the tokens of an API key.

    Args:
        secret: the database's secret.
        digest: the API key's digest. Tokens end with the key that they were signed for.
    """
    return hmac.digest(secret.encode(), digest.encode(), "sha256")


def signed_token(claims: TokenClaims, key_id: str, key: bytes) -> str:
    """A token for an API key, signed with its ``signing_key``."""
    body = orjson.dumps(
        {"user": claims.user, "roles": sorted(claims.roles), "exp": claims.expires_at}
    )
    signed = b"ncrt_%s.%s" % (key_id.encode(), _encoded(body))
    return (signed + b"." + _signature(signed, key)).decode()


def issuer_of(token: bytes) -> str | None:
    """The id of the API key that a token names; None for bytes that are no token."""
    match = _TOKEN.fullmatch(token)
    return None if match is None else match[2].decode()


def read_token(token: bytes, key: bytes, now: float) -> TokenClaims | None:
    """The claims of a token; None if this key did not sign the token, or the token has expired.

    ``now`` is in seconds since 1970.
    """
    match = _TOKEN.fullmatch(token)
    # In Base64 on both sides: several texts decode to one signature, and one of them is right.
    if match is None or not hmac.compare_digest(_signature(match[1], key), match[4]):
        return None
    body = orjson.loads(urlsafe_b64decode(match[3] + b"=" * (-len(match[3]) % 4)))
    left = body["exp"] - now
    # A server whose clock is far ahead signs no token that the others accept for longer.
    if not -CLOCK_SKEW_SECONDS < left <= MAX_TOKEN_SECONDS + CLOCK_SKEW_SECONDS:
        return None
    return TokenClaims(body["user"], frozenset(map(Role, body["roles"])), body["exp"])


def _signature(signed: bytes, key: bytes) -> bytes:
    return _encoded(hmac.digest(key, signed, "sha256"))


def _encoded(content: bytes) -> bytes:
    return urlsafe_b64encode(content).rstrip(b"=")
