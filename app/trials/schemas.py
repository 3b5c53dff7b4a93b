"""Trials of one version beside another."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.core.http import Id, text_problem
from app.models.schemas import iso

Kind = Literal["interleaving", "shadow"]


class RunningTrial(NamedTuple):
    """A trial as requests see it."""

    trial_id: str
    kind: str
    version_a: str
    """What was served when the trial began: it is on only while that is so."""
    version_b: str
    share: float
    """Of the users (interleaving) or requests (shadow), in (0, 1]."""
    created_at: int


class TrialRow(NamedTuple):
    """A trial as stored. Times are microseconds since 1970, UTC."""

    trial_id: str
    kind: str
    version_a: str
    version_b: str
    share: float
    status: str
    created_at: int
    ended_at: int | None
    report: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The trial as clients see it."""
        return self._asdict() | {
            "created_at": iso(self.created_at),
            "ended_at": iso(self.ended_at),
        }


class TrialParams(BaseModel):
    """The body of `POST /admin/trials`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: Kind = Field(
        description="`interleaving`: some users get lists drafted from both versions, and clicks "
        "tell which they prefer; `shadow`: some requests are also ranked by the other version, "
        "which nobody sees, and how far the lists agree is recorded."
    )
    version: Id = Field(description="What is tried beside the active version.")
    share: float = Field(
        default=0.1, gt=0, le=1, description="Of users (interleaving) or requests (shadow)."
    )

    @field_validator("version")
    @classmethod
    def _version(cls, version: str) -> str:
        if problem := text_problem(version):
            raise ValueError(problem)
        return version


class TrialOut(BaseModel):
    """A trial."""

    trial_id: str
    kind: Kind
    version_a: str = Field(description="What was served when it began.")
    version_b: str = Field(description="What is tried beside it.")
    share: float
    status: Literal["running", "ended"]
    created_at: str
    ended_at: str | None
    report: dict[str, Any] | None = Field(
        description="What came of it. Of one that runs: so far, and only where one is asked for."
    )


class TrialPage(BaseModel):
    """Trials, newest first."""

    items: list[TrialOut]
    next_cursor: str | None
