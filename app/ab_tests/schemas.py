"""Rows of trials, and the models of their requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from app.core.errors import Unprocessable
from app.core.openapi import inline_schema
from app.core.requests import Id, Integer, text_problem
from app.registry.schemas import iso
from ncr_core.online import planned_clicked

FOUND_DIFFERENCE = 0.05
PLANNED_CLICKED = planned_clicked(FOUND_DIFFERENCE)
MAX_PLANNED_CLICKED = 1_000_000

VersionKind = Literal["interleaving", "shadow"]
Kind = Literal["interleaving", "settings", "shadow"]
Status = Literal["running", "ended"]
Arm = Literal["a", "b"]
ARMS: tuple[Arm, ...] = get_args(Arm)
MAX_PLANNED_LISTS = 10**9


class RunningABTest(NamedTuple):
    """A running trial, as requests need it."""

    trial_id: str
    kind: Kind
    version_a: str
    """The version that was active at the start. The trial needs this version to stay active."""
    version_b: str
    share: float
    """The share of users (interleaving) or requests (shadow) that take part, or of users who get
    the settings, in (0, 1]."""
    created_at: int
    settings: dict[str, Any] | None = None
    """The settings of arm B in a settings trial, by name."""


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
    settings: dict[str, Any] | None = None
    planned_lists: int | None = None
    planned_clicked: int | None = None
    """The planned number of lists with a click, for interleaving; None without a plan."""


def _checked(version: str) -> str:
    if problem := text_problem(version):
        raise ValueError(problem)
    return version


_Version = Annotated[Id, AfterValidator(_checked)]


class ABTestParams(BaseModel):
    """The body of `POST /admin/trials` for a trial of a version against the active version."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: VersionKind = Field(
        description="`interleaving`: a share of the users gets lists with items from both "
        "versions, and their clicks show which version they prefer. `shadow`: the "
        "other version also ranks a share of the requests. The service compares "
        "its lists but does not show them."
    )
    version: _Version = Field(description="The version to test against the active version.")
    share: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="The share of users (interleaving) or of requests (shadow).",
    )
    planned_clicked: Integer = Field(
        default=PLANNED_CLICKED,
        ge=2,
        le=MAX_PLANNED_CLICKED,
        description="The planned number of lists with a click, for interleaving. The report "
        "is valid once this number is reached. The default finds a difference of "
        f"{FOUND_DIFFERENCE:g} with a probability of 0.8, if each list belongs to "
        "another user.",
    )


class TrialSettings(BaseModel):
    """Settings that a trial can give to a share of the users."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"minProperties": 1},
    )

    diversity: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The `diversity` of requests that do not set the parameter.",
    )
    exclude_seen: bool = Field(
        default=True, description="The `exclude_seen` of requests that do not set the parameter."
    )
    exploration: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of places for exploration in the list of a newcomer. The value "
        "replaces `NCR_EXPLORATION`.",
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("at least one setting is required")
        return self


class SettingsTestParams(BaseModel):
    """The body of `POST /admin/trials` for a trial of settings, of a version, or of both."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("settings", "version")
            ]
        },
    )

    kind: Literal["settings"] = Field(
        description="`settings`: a share of the users gets lists with other settings, with "
        "another version, or with both. The report compares their click-through "
        "with that of the other users."
    )
    share: float = Field(
        default=0.5, gt=0, le=1, description="The share of users who get the tested lists."
    )
    settings: TrialSettings | None = Field(
        default=None, description="The settings to test. A parameter of a request takes precedence."
    )
    version: _Version | None = Field(
        default=None,
        description="The version that ranks for these users. The default is the active version.",
    )
    planned_lists: Integer = Field(
        default=20_000,
        ge=100,
        le=MAX_PLANNED_LISTS,
        description="The planned number of lists of both arms. The test is most precise at "
        "this number, and its interval is valid at any number.",
    )

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.settings is None and self.version is None:
            raise ValueError("a trial needs `settings` or a `version`")
        return self


AnyABTestParams = ABTestParams | SettingsTestParams


def parse_trial(body: Any) -> AnyABTestParams:
    """The parameters of a trial in a parsed body.

    Raises:
        Unprocessable: the kind of trial is unknown.
        ValidationError: a field is invalid.
    """
    kind = body.get("kind") if isinstance(body, dict) else None
    if kind == "settings":
        return SettingsTestParams.model_validate(body)
    if isinstance(kind, str) and kind not in get_args(Kind):
        raise Unprocessable(f"kind: the kinds of trials are {', '.join(get_args(Kind))}")
    return ABTestParams.model_validate(body)


def trial_schema() -> dict[str, Any]:
    """The JSON Schema of the bodies that `parse_trial` takes."""
    return {"oneOf": [inline_schema(ABTestParams), inline_schema(SettingsTestParams)]}


class ABTestOut(BaseModel):
    """A trial."""

    trial_id: str
    kind: Kind
    version_a: str = Field(description="The version that was active at the start of the trial.")
    version_b: str = Field(
        description="The tested version. A trial of settings alone has the same version as "
        "`version_a`."
    )
    share: float
    settings: dict[str, Any] | None = Field(
        description="The settings of arm B in a trial of kind `settings`, otherwise null."
    )
    planned_lists: int | None = Field(
        description="The planned number of lists in a trial of kind `settings`, otherwise null."
    )
    status: Status
    created_at: str
    ended_at: str | None
    report: dict[str, Any] | None = Field(
        description="The report of the trial. A running trial has a preliminary report, only "
        "in `GET` of this trial. For interleaving, `series` is the difference "
        "over time. The field `planned` has the result of the first "
        "`planned_clicked` lists with a click."
    )
    planned_clicked: int | None = Field(
        description="The planned number of lists with a click. The value is null for shadow "
        "trials, and for trials of older versions of the service."
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
