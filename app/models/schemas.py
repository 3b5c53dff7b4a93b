"""What a model of the registry looks like."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import BaseModel, Field


def iso(microseconds: int | None) -> str | None:
    """A stored time as clients see it."""
    if microseconds is None:
        return None
    moment = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Activation(NamedTuple):
    """Which version is served, and which was before it."""

    version: str | None
    previous: str | None
    generation: int


class ModelRow(NamedTuple):
    """A version in the registry. Times are microseconds since 1970, UTC."""

    version: str
    status: str
    kind: str
    factors: int
    path: str
    checksum: str
    trained_seq: int
    users: int
    items: int
    interactions: int
    metrics: dict[str, Any]
    params: dict[str, Any]
    job_id: str | None
    created_at: int
    activated_at: int | None

    def as_json(self, activation: Activation) -> dict[str, Any]:
        """The version as clients see it."""
        return {
            "version": self.version,
            "active": self.version == activation.version,
            "status": self.status,
            "model": self.kind,
            "factors": self.factors,
            "trained_seq": self.trained_seq,
            "users": self.users,
            "items": self.items,
            "interactions": self.interactions,
            "metrics": self.metrics,
            "params": self.params,
            "job_id": self.job_id,
            "created_at": iso(self.created_at),
            "activated_at": iso(self.activated_at),
        }


class ModelOut(BaseModel):
    """A model version."""

    version: str
    active: bool
    status: str
    model: str
    factors: int
    trained_seq: int = Field(description="Events up to this seq were trained on.")
    users: int
    items: int
    interactions: int
    metrics: dict[str, Any]
    params: dict[str, Any]
    job_id: str | None
    created_at: str
    activated_at: str | None


class ModelPage(BaseModel):
    """Models, newest first."""

    items: list[ModelOut]
    next_cursor: str | None
