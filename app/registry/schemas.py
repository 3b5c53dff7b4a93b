"""Rows of the registry, and the models of its requests and responses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["published", "rejected", "deleted"]
Reason = Literal["published", "activated", "rolled_back", "returned"]
"""Why the active version changed."""

BY = (
    "The id of the key that asked for it; `admin` for `NCR_ADMIN_KEY`, `local` where there are no "
    "keys, `ncr` for the command. Null for the service itself."
)
"""Description of the field `by`."""


class ActivationChange(NamedTuple):
    """A change of the active version."""

    generation: int
    version: str | None
    previous: str | None
    """The version that was active before; the version itself if it was only pinned or unpinned."""
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
    """The version that a rollback leads to."""
    generation: int
    """Grows with every change."""
    pinned: bool = False
    """While it is set, newly trained versions are published without being activated."""


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
    pinned: bool = Field(description="Newer versions are not activated until it is unpinned.")
    status: Status = Field(
        description="`rejected` by the gate; `deleted`: only its metrics are kept, not its files."
    )
    model: str
    factors: int
    trained_seq: int = Field(description="The model was trained on the events up to this seq.")
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
    """A change of the active version."""

    generation: int = Field(description="Grows with every change.")
    version: str | None
    previous: str | None = Field(
        description="The version active before; the version itself if it was pinned or unpinned."
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
    """Changes of the active version, newest first."""

    items: list[ActivationOut]
    next_cursor: str | None


class ClickThrough(BaseModel):
    """Click-through of a version's lists."""

    lists: int = Field(description="Lists that were served.")
    clicked: int = Field(
        description="Lists whose `recommendation_id` came back with a positive event."
    )
    rate: float | None = Field(description="0 to 1; null if no list was served.")


class ModelDetail(ModelOut):
    """A model version with its activations and click-through."""

    activations: list[ActivationOut] = Field(
        description="When and why it was activated, newest first, at most 100."
    )
    click_through: ClickThrough


class ForceBody(BaseModel):
    """The optional body of an activation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = Field(
        default=False,
        description="Accept a version that the gate has rejected; the history records it.",
    )


class PinOut(BaseModel):
    """The active version, and whether it is pinned."""

    version: str | None
    previous: str | None = Field(description="The version that a rollback leads to.")
    pinned: bool


class ModelPage(BaseModel):
    """Models, newest first."""

    items: list[ModelOut]
    next_cursor: str | None
