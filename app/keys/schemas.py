"""Rows of API keys."""

from __future__ import annotations

from typing import NamedTuple

from app.core.access import BUNDLES, Role


class KeyRow(NamedTuple):
    """An API key in the database. Times are microseconds since 1970, UTC."""

    key_id: str
    name: str
    roles: str
    """Names of roles, separated by commas."""
    digest: str
    rate: float | None
    """Requests per second; None for the service's setting."""
    burst: int | None
    created_at: int
    revoked_at: int | None

    @property
    def role_set(self) -> frozenset[Role]:
        """The key's roles, bundles opened."""
        roles = [Role(name) for name in self.roles.split(",")]
        return frozenset().union(*(BUNDLES.get(role, {role}) for role in roles))
