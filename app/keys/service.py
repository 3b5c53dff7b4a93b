"""API keys: created, listed, revoked and identified."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Collection

from sqlalchemy.exc import SQLAlchemyError

from app.core.access import Role
from app.core.cache import SingleFlight
from app.core.database import Database
from app.core.errors import NotFound, SettingsError
from app.core.logging import get_logger
from app.core.requests import text_problem
from app.core.security import Caller
from app.core.tables import now_us
from app.keys.repository import KeyRepository
from app.keys.schemas import KeyRow

log = get_logger(__name__)

REFRESH_SECONDS = 1.0
"""How long a key that was revoked on another server may still be accepted."""
UNKNOWN_KEY_REFRESH_SECONDS = 0.1
"""The least time between two reads of the keys that unknown keys cause."""
MAX_RATE = 1e6

_KEY = re.compile(r"ncr_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


class KeyService:
    """Keeps all keys in memory, and reads them again every second while requests come."""

    def __init__(self, database: Database) -> None:
        self._repository = KeyRepository(database)
        self._keys: dict[str, KeyRow] = {}
        self._has_keys = False
        self._read_at = -float("inf")
        self._reads: SingleFlight[None, None] = SingleFlight()

    async def any(self) -> bool:
        """Whether a key was ever created: if so, every request needs one."""
        await self._refresh(REFRESH_SECONDS)
        self._has_keys = self._has_keys or bool(self._keys)
        return self._has_keys

    async def identify(self, key: bytes) -> Caller | None:
        """The caller that a key belongs to; None for an unknown or revoked key."""
        match = _KEY.fullmatch(key.decode("latin-1"))
        if match is None:
            return None
        known = match[1] in self._keys
        await self._refresh(REFRESH_SECONDS if known else UNKNOWN_KEY_REFRESH_SECONDS)
        row = self._keys.get(match[1])
        digest = hashlib.sha256(key).hexdigest()
        # Digests have the same length, so the time of the comparison reveals nothing.
        if not hmac.compare_digest(digest, row.digest if row else "0" * 64):
            return None
        if row is None or row.revoked_at is not None:
            return None
        return Caller(row.key_id, row.role_set, row.rate, row.burst)

    async def create(
        self,
        name: str,
        roles: Collection[Role],
        rate: float | None = None,
        burst: int | None = None,
    ) -> tuple[KeyRow, str]:
        """Creates a key and returns its row and the key itself, which is not stored."""
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
            raise SettingsError("a burst needs a rate of the key's own")
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
            raise NotFound("there is no such key, or it has been revoked", code="unknown_key")

    async def _refresh(self, seconds: float) -> None:
        if time.monotonic() - self._read_at >= seconds:
            await self._reads.run(None, self._read)

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            rows = await self._repository.list()
        except SQLAlchemyError as error:
            if self._read_at < 0:
                raise  # no key was ever read, so no caller can be identified
            # The keys of a moment ago still count; most requests need the database anyway.
            log.warning("the keys cannot be read", error=str(error).partition("\n")[0])
            self._read_at = began
            return
        self._keys = {row.key_id: row for row in rows}
        self._read_at = began
