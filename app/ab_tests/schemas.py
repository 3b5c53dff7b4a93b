"""Rows of trials, and the models of their requests and responses."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.core.requests import Id, text_problem
from app.registry.schemas import iso

Kind = Literal["interleaving", "shadow"]
Status = Literal["running", "ended"]


class RunningABTest(NamedTuple):
    """A running trial, as requests need it."""

    trial_id: str
    kind: Kind
    version_a: str
    """The version that was active when the trial began; the trial is on only while it is."""
    version_b: str
    share: float
    """The share of users (interleaving) or requests (shadow) that take part, in (0, 1]."""
    created_at: int


class ABTestRow(NamedTuple):
    """A trial in the database. Times are microseconds since 1970, UTC."""

    trial_id: str
    kind: Kind
    version_a: str
    version_b: str
    share: float
    status: Status
    created_at: int
    ended_at: int | None
    report: dict[str, Any] | None


class ABTestParams(BaseModel):
    """The body of `POST /admin/trials`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: Kind = Field(
        description="`interleaving`: some users get lists drafted from both versions, and their "
        "clicks show which version they prefer. `shadow`: some requests are also ranked by the "
        "other version; its list is not shown, only compared."
    )
    version: Id = Field(description="The version to test against the active one.")
    share: float = Field(
        default=0.1, gt=0, le=1, description="Share of users (interleaving) or requests (shadow)."
    )

    @field_validator("version")
    @classmethod
    def _version(cls, version: str) -> str:
        if problem := text_problem(version):
            raise ValueError(problem)
        return version


class ABTestOut(BaseModel):
    """A trial."""

    trial_id: str
    kind: Kind
    version_a: str = Field(description="The version that was active when the trial began.")
    version_b: str = Field(description="The version that is tested against it.")
    share: float
    status: Status
    created_at: str
    ended_at: str | None
    report: dict[str, Any] | None = Field(
        description="The result. Of a running trial: so far, and only for `GET` of this one trial."
    )

    @classmethod
    def from_row(cls, row: ABTestRow) -> Self:
        """The response for a row."""
        return cls(
            **row._asdict() | {"created_at": iso(row.created_at), "ended_at": iso(row.ended_at)}
        )


class ABTestPage(BaseModel):
    """Trials, newest first."""

    items: list[ABTestOut]
    next_cursor: str | None
