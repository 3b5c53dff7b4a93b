"""Keys: made, listed, revoked, and told apart at the door."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from app.core.cache import SingleFlight
from app.core.database import Database
from app.core.errors import NotFound, SettingsError
from app.core.http import text_problem
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.core.roles import Role
from app.core.security import Caller
from app.keys.schemas import KeyRow
from app.keys.tables import api_keys

log = get_logger(__name__)

KNOWN_SECONDS = 1.0
"""How long a key that was revoked elsewhere may go on."""
UNKNOWN_SECONDS = 0.1
"""How often the database is asked for keys that are not known."""
MAX_RATE = 1e6

_KEY = re.compile(r"ncr_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_COLUMNS = [api_keys.c[name] for name in KeyRow._fields]


class KeyService:
    """Knows the keys by heart, and looks them up again every second while somebody asks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, KeyRow] = {}
        self._ever = False
        self._read_at = -float("inf")
        self._reads: SingleFlight[None, None] = SingleFlight()

    async def any(self) -> bool:
        """Whether there ever was a key: then none but their bearers are let in."""
        await self._refresh(KNOWN_SECONDS)
        self._ever = self._ever or bool(self._known)
        return self._ever

    async def identify(self, key: bytes) -> Caller | None:
        """Whose key this is; None for one that is not, or not any more."""
        match = _KEY.fullmatch(key.decode("latin-1"))
        if match is None:
            return None
        await self._refresh(KNOWN_SECONDS if match[1] in self._known else UNKNOWN_SECONDS)
        row = self._known.get(match[1])
        digest = hashlib.sha256(key).hexdigest()
        # Digests have one length, so that the comparison tells nothing of the key.
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
        """A new key: its row and the key itself, which is not kept and never shown again."""
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
        async with self._database.write() as conn:
            await conn.execute(api_keys.insert().values(row._asdict()))
        return row, key

    async def rows(self) -> list[KeyRow]:
        """Every key, newest first."""
        rows = await self._database.fetch(
            sa.select(*_COLUMNS).order_by(api_keys.c.created_at.desc(), api_keys.c.key_id)
        )
        return [KeyRow(*row) for row in rows]

    async def revoke(self, key_id: str) -> None:
        """From now on here, and within a second elsewhere, the key opens nothing."""
        async with self._database.write() as conn:
            done = await conn.execute(
                api_keys.update()
                .where((api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None))
                .values(revoked_at=now_us())
            )
        self._read_at = -float("inf")
        if done.rowcount != 1:
            raise NotFound("there is no such key, or it has been revoked", code="unknown_key")

    async def _refresh(self, seconds: float) -> None:
        if time.monotonic() - self._read_at >= seconds:
            await self._reads.run(None, self._read)

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            rows = await self.rows()
        except SQLAlchemyError as error:
            if self._read_at < 0:
                raise  # nothing is known yet: nobody can be let in
            # Who was let in a moment ago still is; the rest needs the database anyway.
            log.warning("the keys cannot be read", error=str(error).partition("\n")[0])
            self._read_at = began
            return
        self._known = {row.key_id: row for row in rows}
        self._read_at = began
