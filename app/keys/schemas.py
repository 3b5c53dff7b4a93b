"""What a key is to those who use it."""

from __future__ import annotations

from typing import NamedTuple

from app.core.roles import Role


class KeyRow(NamedTuple):
    """A key in the database. Times are microseconds since 1970, UTC."""

    key_id: str
    name: str
    roles: str
    digest: str
    rate: float | None
    """Requests a second; None: the service's setting."""
    burst: int | None
    created_at: int
    revoked_at: int | None

    @property
    def role_set(self) -> frozenset[Role]:
        """What it opens: an administrator's opens all."""
        own = frozenset(Role(name) for name in self.roles.split(","))
        return frozenset(Role) if Role.ADMIN in own else own
