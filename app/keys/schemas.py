"""Rows of API keys, and the body and the answer of `POST /tokens`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from app.core.access import BUNDLES, Role
from app.core.requests import Id
from app.keys.tokens import MAX_TOKEN_SECONDS


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
        """The key's roles, with each bundle replaced by its roles."""
        roles = [Role(name) for name in self.roles.split(",")]
        return frozenset().union(*(BUNDLES.get(role, {role}) for role in roles))


class TokenBody(BaseModel):
    """The body of `POST /tokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    user: Id = Field(description="The user whose lists and events the token permits.")
    ttl_s: float = Field(
        default=300,
        ge=1,
        le=MAX_TOKEN_SECONDS,
        description="The lifetime of the token in seconds. A client requests the next token "
        "before the end.",
    )
    roles: list[Literal["recommend", "events"]] | None = Field(
        default=None,
        min_length=1,
        description="The roles of the token. The default is both roles, as far as the key has "
        "them.",
    )


class TokenOut(BaseModel):
    """A signed token."""

    token: str
    expires_at: datetime
