"""API keys: creation, list, revocation and identification, and tokens and sessions for them."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from app.core.access import Role
from app.core.cache import SingleFlight
from app.core.database import Database
from app.core.errors import Conflict, NotFound, SettingsError
from app.core.logging import get_logger
from app.core.requests import text_problem
from app.core.security import ADMIN, Caller, role_missing
from app.core.tables import now_us
from app.keys.repository import KeyRepository
from app.keys.schemas import KeyRow
from app.keys.sessions import (
    SESSION_SECONDS,
    is_valid_session,
    session_issuer,
    signed_session,
)
from app.keys.tokens import (
    TOKEN_ROLES,
    TokenClaims,
    issuer_of,
    read_token,
    signed_token,
    signing_key,
)

log = get_logger(__name__)

REFRESH_SECONDS = 1.0
"""The time for which a server may still accept a key that another server revoked."""
UNKNOWN_KEY_REFRESH_SECONDS = 0.1
"""The minimum time between two reads of the keys that unknown keys cause."""
MAX_RATE = 1e6

_KEY = re.compile(r"ncr_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


class _ValidKey(NamedTuple):
    digest: str
    caller: Caller


class KeyService:
    """Keeps the valid keys in memory, and reads them again every second while requests come."""

    def __init__(self, database: Database) -> None:
        self._repository = KeyRepository(database)
        self._keys: dict[str, _ValidKey] = {}
        self._has_keys = False
        self._read_at = -float("inf")
        self._reads: SingleFlight[None, None] = SingleFlight()
        self._token_secret: str | None = None

    async def any(self) -> bool:
        """Whether a key was ever created. Then every request needs a key."""
        await self._refresh(REFRESH_SECONDS)
        return self._has_keys

    async def identify(self, key: bytes) -> Caller | None:
        """The caller that a key belongs to; None for an unknown or revoked key."""
        match = _KEY.fullmatch(key.decode("latin-1"))
        if match is None:
            return None
        found = await self._valid_key(match[1])
        digest = hashlib.sha256(key).hexdigest()
        # Digests have the same length, so the time of the comparison reveals nothing.
        if not hmac.compare_digest(digest, found.digest if found else "0" * 64) or found is None:
            return None
        return found.caller

    async def identify_token(self, token: bytes) -> Caller | None:
        """The caller that a token stands for; None for a false, expired or revoked token."""
        key_id = issuer_of(token)
        found = None if key_id is None else await self._valid_key(key_id)
        if found is None:
            return None
        claims = read_token(token, await self._signing_key(found), time.time())
        if claims is None:
            return None
        caller = found.caller
        return replace(caller, roles=caller.roles & claims.roles, user=claims.user)

    async def sign_token(
        self, caller: Caller, user: str, seconds: float, roles: Collection[str] | None = None
    ) -> tuple[str, int]:
        """Signs a token and returns it with its expiry in seconds since 1970.

        Args:
            caller: the caller whose key signs the token. The token ends with the key.
            user: the only user whom the token is for.
            seconds: the lifetime of the token.
            roles: some of ``TOKEN_ROLES``; None for all of them that the key has.

        Raises:
            Conflict: ``key_not_stored``: the caller has no key in the database.
            Forbidden: ``role_missing``: the key lacks a role of the token.
        """
        found = self._keys.get(caller.key_id)
        if found is None:
            raise Conflict(
                "a token needs a revocable key: create a key with `ncr keys create NAME "
                "--role tokens --role recommend --role events`",
                code="key_not_stored",
            )
        wanted = TOKEN_ROLES & caller.roles if roles is None else frozenset(map(Role, roles))
        missing = wanted - caller.roles if wanted else TOKEN_ROLES
        if missing:
            raise role_missing(min(missing))
        claims = TokenClaims(user, wanted, math.ceil(time.time() + seconds))
        return (
            signed_token(claims, caller.key_id, await self._signing_key(found)),
            claims.expires_at,
        )

    async def sign_session(self, caller: Caller, admin: bytes | None) -> str | None:
        """Signs a session in a browser for a caller's key; None for a caller without a key.

        The session ends with the key, or after ``SESSION_SECONDS``. Every server of the database
        accepts the session.

        Args:
            caller: the key that signs in.
            admin: the digest of `NCR_ADMIN_KEY`.
        """
        key = await self._session_key(caller.key_id, admin)
        if key is None:
            return None
        return signed_session(caller.key_id, math.ceil(time.time() + SESSION_SECONDS), key)

    async def identify_session(self, session: bytes, admin: bytes | None) -> Caller | None:
        """The caller of a session; None for a false or expired session, or a revoked key."""
        key_id = session_issuer(session)
        key = None if key_id is None else await self._session_key(key_id, admin)
        if key_id is None or key is None or not is_valid_session(session, key, time.time()):
            return None
        found = self._keys.get(key_id)
        return ADMIN if found is None else found.caller

    async def _session_key(self, key_id: str, admin: bytes | None) -> bytes | None:
        if key_id == ADMIN.key_id:
            digest = None if admin is None else admin.hex()
        else:
            found = await self._valid_key(key_id)
            digest = None if found is None else found.digest
        if digest is None:
            return None
        if self._token_secret is None:
            self._token_secret = await self._repository.token_secret()
        return signing_key(self._token_secret, digest)

    async def create(
        self,
        name: str,
        roles: Collection[Role],
        rate: float | None = None,
        burst: int | None = None,
    ) -> tuple[KeyRow, str]:
        """Creates a key and returns its row and the key itself, which the database does not hold.

        Raises SettingsError for an invalid name, rate or burst, and without roles.
        """
        problem = text_problem(name)
        if problem is not None:
            raise SettingsError(f"the name {problem}")
        if not roles:
            raise SettingsError("a key needs a role")
        if rate is not None and not 0 < rate <= MAX_RATE:
            raise SettingsError(f"the rate must be above 0 and at most {MAX_RATE:,.0f}")
        if burst is not None and not 1 <= burst <= MAX_RATE:
            raise SettingsError(f"the burst must be 1 to {MAX_RATE:,.0f}")
        if burst is not None and rate is None:
            raise SettingsError("a burst needs a rate for the same key")
        key_id = secrets.token_hex(6)
        key = f"ncr_{key_id}_{secrets.token_urlsafe(32)}"
        row = KeyRow(
            key_id,
            name,
            ",".join(sorted(set(roles))),
            hashlib.sha256(key.encode()).hexdigest(),
            rate,
            burst,
            now_us(),
            None,
        )
        await self._repository.insert(row)
        self._read_at = -float("inf")
        return row, key

    async def rows(self) -> list[KeyRow]:
        """Every key, newest first."""
        return await self._repository.list()

    async def revoke(self, key_id: str) -> None:
        """Revokes a key: on this server at once, on others within a second. Raises NotFound."""
        revoked = await self._repository.revoke(key_id)
        self._read_at = -float("inf")
        if not revoked:
            raise NotFound("the key does not exist or is revoked", code="unknown_key")

    async def _refresh(self, seconds: float) -> None:
        if time.monotonic() - self._read_at >= seconds:
            await self._reads.run(None, self._read)

    async def _valid_key(self, key_id: str) -> _ValidKey | None:
        known = key_id in self._keys
        await self._refresh(REFRESH_SECONDS if known else UNKNOWN_KEY_REFRESH_SECONDS)
        return self._keys.get(key_id)

    async def _signing_key(self, key: _ValidKey) -> bytes:
        if self._token_secret is None:
            self._token_secret = await self._repository.token_secret()
        return signing_key(self._token_secret, key.digest)

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            rows = await self._repository.valid()
            self._has_keys = self._has_keys or bool(rows) or await self._repository.any()
        except SQLAlchemyError as error:
            if self._read_at < 0:
                raise  # no key was ever read, so no caller can be identified
            # The keys of a moment ago still count; most requests need the database anyway.
            log.warning("the keys cannot be read", error=str(error).partition("\n")[0])
            self._read_at = began
            return
        self._keys = {
            row.key_id: _ValidKey(row.digest, Caller(row.key_id, row.role_set, row.rate, row.burst))
            for row in rows
        }
        self._read_at = began
