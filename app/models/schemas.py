"""What a model of the registry looks like."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


def iso(microseconds: int | None) -> str | None:
    """A stored time as clients see it."""
    if microseconds is None:
        return None
    moment = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Activation(NamedTuple):
    """Which version is served, and which one a rollback would lead to.

    While it is ``pinned``, what is trained is published without being served.
    """

    version: str | None
    previous: str | None
    generation: int
    pinned: bool = False


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
            "pinned": activation.pinned and self.version == activation.version,
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
    pinned: bool = Field(description="Newer versions are not served until it is unpinned.")
    status: Literal["published", "rejected", "deleted"] = Field(
        description="`rejected` by the gate; `deleted`: its files are gone, its figures are kept."
    )
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


class ActivationOut(BaseModel):
    """A change of what is served."""

    generation: int = Field(description="Grows with every change.")
    version: str | None
    previous: str | None = Field(
        description="What was served before; the version itself where it was pinned or unpinned."
    )
    reason: Literal["published", "activated", "rolled_back", "returned"]
    detail: dict[str, Any] | None
    at: str


class ActivationPage(BaseModel):
    """Changes of what is served, newest first."""

    items: list[ActivationOut]
    next_cursor: str | None


class ClickThrough(BaseModel):
    """How many of a version's lists were clicked."""

    lists: int = Field(description="That were given out.")
    clicked: int = Field(description="Of which a positive event told the `recommendation_id`.")
    rate: float | None = Field(description="0 to 1; null where no list was given out.")


class ModelDetail(ModelOut):
    """A model version and what became of it."""

    activations: list[ActivationOut] = Field(
        description="When it began to be served and why, newest first, 100 at most."
    )
    click_through: ClickThrough


class ForceBody(BaseModel):
    """The body of an activation, which may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = Field(
        default=False, description="Also a version that the gate has rejected; it is recorded."
    )


class PinOut(BaseModel):
    """What is served, and whether it stays."""

    version: str | None
    previous: str | None = Field(description="Where a rollback would lead.")
    pinned: bool


class ModelPage(BaseModel):
    """Models, newest first."""

    items: list[ModelOut]
    next_cursor: str | None
