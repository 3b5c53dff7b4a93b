"""Jobs and what a training job can be asked for."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.models.schemas import iso

Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "rejected"]
Trigger = Literal["request", "schedule", "events"]
ENDED = ("succeeded", "failed", "cancelled", "rejected")


class TrainParams(BaseModel):
    """The body of `POST /admin/train`; what is left out takes the service's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Literal["nbpr", "dncr", "neupr"] | None = None
    factors: int | None = Field(default=None, ge=1, le=512)
    layers: int = Field(default=4, ge=1, le=6)
    users: Literal["free", "history"] | None = Field(
        default=None,
        description="What a user's vector is: `free`, learned for each user, or `history`, made of "
        "the items that the user took up, the latest ones counting most. By default as the service "
        "is set. With `history`, `epochs` is 6 and `learning_rate` 0.005 unless given.",
    )
    epochs: int = Field(default=15, ge=1, le=1000)
    negatives: int = Field(default=4, ge=1, le=100)
    learning_rate: float = Field(default=1e-2, gt=0, le=10)
    batch_size: int = Field(default=0, ge=0, le=1_000_000)
    pretrain: bool = True
    alpha: float = Field(default=0.5, ge=0, le=1)
    min_interactions: int = Field(
        default=1,
        ge=1,
        lt=2**31,
        description="Items with fewer interactions are left out of training.",
    )
    seed: int = Field(default=0, ge=0, lt=2**31)
    start: Literal["scratch", "warm"] | None = Field(
        default=None,
        description="`warm` begins from the served model, whose kind, factors and layers it has to "
        "have: fewer epochs, at the rate of fine-tuning. By default as the service is set.",
    )
    force: bool = Field(
        default=False,
        description="Publish whatever the gate finds; its report says that it was forced.",
    )

    @field_validator(
        *("factors", "layers", "epochs", "negatives", "batch_size", "min_interactions", "seed"),
        mode="before",
    )
    @classmethod
    def _whole(cls, value: Any) -> Any:
        # In JSON 5.0 is as whole a number as 5.
        return int(value) if isinstance(value, float) and value.is_integer() else value


class TrainOrder(TrainParams):
    """What a training job is kept with: the request, made whole, and who asked."""

    trigger: Trigger = "request"


class JobRow(NamedTuple):
    """A job as stored. Times are microseconds since 1970, UTC."""

    job_id: str
    kind: str
    status: str
    params: dict[str, Any]
    progress: dict[str, Any] | None
    attempt: int
    owner: str | None
    lease_until: int | None
    cancel_requested: bool
    created_at: int
    started_at: int | None
    finished_at: int | None
    model_version: str | None
    metrics: dict[str, Any] | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        """The job as clients see it."""
        return {
            "job_id": self.job_id,
            "kind": self.kind,
            "status": self.status,
            "params": self.params,
            "progress": self.progress,
            "attempt": self.attempt,
            "created_at": iso(self.created_at),
            "started_at": iso(self.started_at),
            "finished_at": iso(self.finished_at),
            "model_version": self.model_version,
            "metrics": self.metrics,
            "error": self.error,
        }


class JobProgress(BaseModel):
    """Where a running job stands."""

    phase: str
    epoch: int
    epochs: int
    loss: float | None
    ndcg: float | None = Field(description="NDCG@10 on the validation items.")
    eta_s: float | None = Field(description="Seconds left, as far as it can be told.")


class JobOut(BaseModel):
    """A job."""

    job_id: str
    kind: str
    status: Status
    params: dict[str, Any]
    progress: JobProgress | None
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    model_version: str | None
    metrics: dict[str, Any] | None
    error: str | None


class JobPage(BaseModel):
    """Jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


class JobAccepted(BaseModel):
    """The answer to a request for training."""

    job_id: str
