"""The typed order that a worker sends to its child process, as one line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.core.settings import Settings
from app.jobs.schemas import TrainOrder

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskSettings(BaseModel):
    """The worker's settings that decide what a child process reads and where it writes."""

    model_config = _FROZEN

    data_dir: Path
    database_url: str = Field(repr=False)
    checkpoint_store: str | None = None
    candidates: int
    precompute_users: int
    feedback: str | None = None
    feedback_half_life_days: float | None = None
    train_budget: float | None = None
    train_memory_bytes: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> TaskSettings:
        """Copies the settings, with the database and the data folder resolved."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        return cls.model_validate(
            values
            | {
                "data_dir": settings.data_dir.resolve(),
                "database_url": settings.effective_database_url,
            }
        )


class _Task(BaseModel):
    model_config = _FROZEN

    version: str
    """The model version to write, or to compute candidates with."""
    device: str
    watchdog_seconds: float = Field(gt=0)
    """The child exits when it hears nothing from its worker for so long."""
    retry_seconds: float = Field(ge=0)
    """How long the child retries while the database or the checkpoint store is away."""
    settings: TaskSettings


class TrainingTask(_Task):
    """Train a model, compare it with the served one, and write its checkpoint."""

    kind: Literal["train"] = "train"
    params: TrainOrder
    gate_margin: float
    """By which share of the served model's NDCG@10 the new model may be worse."""
    expected_seconds: dict[str, float] | None = None
    """Seconds that each phase of the last training took, for the estimated time left."""


class PrecomputeTask(_Task):
    """Compute the candidates of the most active users with a published model."""

    kind: Literal["candidates"] = "candidates"


TASK: TypeAdapter[TrainingTask | PrecomputeTask] = TypeAdapter(
    Annotated[TrainingTask | PrecomputeTask, Field(discriminator="kind")]
)
"""Reads a task from JSON; raises ValidationError for what is no task of this version."""
