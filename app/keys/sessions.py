"""Sessions in a browser: a key's id and an expiry, signed, so that any server can read them."""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64encode

SESSION_SECONDS = 12 * 3600

# `ncrs_`, the id of the key or `admin`, the expiry in seconds since 1970, and the signature.
_SESSION = re.compile(rb"(ncrs_([0-9a-f]{12}|admin)\.([0-9]{10,11}))\.([A-Za-z0-9_-]{43})")


def signed_session(key_id: str, expires_at: int, key: bytes) -> str:
    """A session for an API key, signed with its `app.keys.tokens.signing_key`.

    ``expires_at`` is in seconds since 1970.
    """
    signed = f"ncrs_{key_id}.{expires_at}".encode()
    return (signed + b"." + _signature(signed, key)).decode()


def session_issuer(session: bytes) -> str | None:
    """The id of the API key that a session names; None for bytes that are no session."""
    match = _SESSION.fullmatch(session)
    return None if match is None else match[2].decode()


def is_valid_session(session: bytes, key: bytes, now: float) -> bool:
    """Whether this key signed a session that has not expired at ``now``, in seconds since 1970."""
    match = _SESSION.fullmatch(session)
    if match is None or not hmac.compare_digest(_signature(match[1], key), match[4]):
        return False
    return 0 < int(match[3]) - now <= SESSION_SECONDS + 60  # as the clocks of servers differ


def _signature(signed: bytes, key: bytes) -> bytes:
    # Named, so that no signature of a token is one of a session.
    return urlsafe_b64encode(hmac.digest(key, b"session\0" + signed, "sha256")).rstrip(b"=")
