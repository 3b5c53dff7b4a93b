"""Rows of the registry, and the models of its requests and responses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["published", "rejected", "deleted"]
Reason = Literal["published", "activated", "rolled_back", "returned"]
"""The reason for a change of the active version."""

BY = (
    "The id of the key that requested the change. The value is `admin` for `NCR_ADMIN_KEY`, "
    "`local` without keys, `ncr` for the command, and null for the service."
)
"""Description of the field `by`."""


class ActivationChange(NamedTuple):
    """An activation."""

    generation: int
    version: str | None
    previous: str | None
    """The version that was active before; the same version after a change of the pin alone."""
    reason: Reason
    detail: dict[str, Any] | None
    at: int
    """Microseconds since 1970, UTC."""
    by: str | None = None
    """See `app.core.security.Caller.key_id`; None for the service itself."""


def iso(microseconds: int | None) -> str | None:
    """A stored time, in microseconds since 1970, as ISO 8601."""
    if microseconds is None:
        return None
    moment = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Activation(NamedTuple):
    """The active version."""

    version: str | None
    previous: str | None
    """The version that a rollback activates."""
    generation: int
    """A number that grows with every activation and every change of the pin."""
    pinned: bool = False
    """Whether newly trained versions are published without being activated."""


class ModelRow(NamedTuple):
    """A version in the registry. Times are microseconds since 1970, UTC."""

    version: str
    status: Status
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


class ModelOut(BaseModel):
    """A model version."""

    version: str
    active: bool
    pinned: bool = Field(
        description="True if the version is pinned. A pin keeps newer versions from becoming "
        "active."
    )
    status: Status = Field(
        description="`published`, `rejected` by the gate, or `deleted`. A deleted version has "
        "metrics but no files."
    )
    model: str
    factors: int
    trained_seq: int = Field(description="The training data has the events up to this seq.")
    users: int
    items: int
    interactions: int
    metrics: dict[str, Any]
    params: dict[str, Any]
    job_id: str | None
    created_at: str
    activated_at: str | None

    @classmethod
    def from_row(cls, row: ModelRow, activation: Activation, **details: Any) -> Self:
        """The response for a row; ``details`` are the fields that a subclass adds."""
        active = row.version == activation.version
        return cls(
            **row._asdict()
            | {
                "model": row.kind,
                "active": active,
                "pinned": active and activation.pinned,
                "created_at": iso(row.created_at),
                "activated_at": iso(row.activated_at),
            },
            **details,
        )


class ActivationOut(BaseModel):
    """An activation."""

    generation: int = Field(
        description="A number that grows with every activation and every change of the pin."
    )
    version: str | None
    previous: str | None = Field(
        description="The version that was active before. After a change of the pin alone, "
        "both versions are the same."
    )
    reason: Reason
    detail: dict[str, Any] | None
    at: str
    by: str | None = Field(description=BY)

    @classmethod
    def from_change(cls, change: ActivationChange) -> Self:
        """The response for a change."""
        return cls(**change._asdict() | {"at": iso(change.at)})


class ActivationPage(BaseModel):
    """Activations, newest first."""

    items: list[ActivationOut]
    next_cursor: str | None


class ClickThrough(BaseModel):
    """The click-through of a version."""

    lists: int = Field(description="The number of lists served.")
    clicked: int = Field(
        description="The number of lists with a positive event that names their "
        "`recommendation_id`."
    )
    rate: float | None = Field(
        description="The share of lists with a click, 0 to 1. The rate is null without lists."
    )


class ModelDetail(ModelOut):
    """A model version with its activations and click-through."""

    activations: list[ActivationOut] = Field(
        description="The activations of the version, newest first, at most 100."
    )
    click_through: ClickThrough


class ForceBody(BaseModel):
    """The optional body of an activation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = Field(
        default=False,
        description="Accept a version that the gate rejected. The history records the force.",
    )


class PinOut(BaseModel):
    """The active version and its pin."""

    version: str | None
    previous: str | None = Field(description="The version that a rollback activates.")
    pinned: bool


class ModelPage(BaseModel):
    """Model versions, newest first."""

    items: list[ModelOut]
    next_cursor: str | None
