"""What the rest of the service asks of jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.settings import Settings
from app.jobs.repository import JobRepository
from app.jobs.schemas import ENDED, JobRow, TrainParams, Trigger
from app.models.schemas import ModelRow

Serving = Callable[[], Awaitable[ModelRow | None]]


OF_HISTORY = {"epochs": 6, "learning_rate": 5e-3}
"""What is enough for models whose users' vectors are made of their items."""


class JobService:
    """Durable jobs: submitted here, done by a worker."""

    def __init__(
        self, database: Database, settings: Settings, serving: Serving | None = None
    ) -> None:
        """``serving`` gives the model that is served, which a training may begin from."""
        self._repository = JobRepository(database)
        self._settings = settings
        self._serving = serving

    async def submit_training(self, params: TrainParams) -> str:
        """Queues a training and returns its job id.

        Raises Unprocessable where it is asked to begin from the served model and cannot.
        """
        return await self._repository.insert("train", await self._whole(params, "request"))

    async def order(self, trigger: Trigger) -> dict[str, Any]:
        """A training as the service is set, for `queue`."""
        return await self._whole(TrainParams(), trigger)

    async def queue(self, order: dict[str, Any], conn: AsyncConnection) -> str:
        """Queues a training in the caller's transaction; its job id."""
        return await self._repository.insert("train", order, conn)

    async def _whole(self, params: TrainParams, trigger: Trigger) -> dict[str, Any]:
        """What the job is kept with: nothing in it is left to defaults."""
        if params.start == "warm":
            base = None if self._serving is None else await self._serving()
            problem = _not_from(base, params)
            if problem is not None or base is None:
                raise Unprocessable(f"start: {problem}", code="cannot_start_warm")
            params = params.model_copy(update=_architecture(base))
        # Where it is only the setting, the training finds out whether it can: what is served must
        # not make itself the default for ever.
        start = params.start or self._settings.train_start
        values = params.model_dump() | {"start": start, "trigger": trigger}
        values["model"] = values["model"] or self._settings.default_model
        values["factors"] = values["factors"] or self._settings.default_factors
        values["users"] = values["users"] or self._settings.default_users
        if values["users"] == "history":
            values |= {n: v for n, v in OF_HISTORY.items() if n not in params.model_fields_set}
        return values

    async def get(self, job_id: str) -> JobRow:
        """A job; 404 if there is none."""
        row = await self._repository.get(job_id)
        if row is None:
            raise NotFound("there is no such job", code="unknown_job")
        return row

    async def page(self, offset: int, n: int) -> tuple[list[JobRow], int | None]:
        """Jobs, newest first, and where the next page begins."""
        rows = await self._repository.page(offset, n + 1)
        return rows[:n], offset + n if len(rows) > n else None

    async def states(self) -> list[tuple[str, str, int, int]]:
        """`(kind, status, how many, when the oldest was made)` of all jobs."""
        return await self._repository.states()

    async def cancel(self, job_id: str) -> JobRow:
        """Asks for an end of the job; 409 if it has ended."""
        row = await self.get(job_id)
        if row.status in ENDED:
            raise Conflict(f"the job has ended already: {row.status}", code="job_ended")
        await self._repository.request_cancel(job_id)
        row = await self.get(job_id)
        if row.status in ENDED and not row.cancel_requested:  # a moment ago
            raise Conflict(f"the job has ended already: {row.status}", code="job_ended")
        return row


def _architecture(row: ModelRow) -> dict[str, Any]:
    return {
        "model": row.kind,
        "factors": row.factors,
        "layers": row.params.get("layers", 4),
        "users": row.params.get("users") or "free",
    }


def _not_from(base: ModelRow | None, params: TrainParams) -> str | None:
    """Why a training cannot begin from this model; None if it can."""
    if base is None:
        return "no model is served yet that training could begin from"
    wanted = {name: getattr(params, name) for name in params.model_fields_set}
    other = [
        f"{name} {value}, not {wanted[name]}"
        for name, value in _architecture(base).items()
        if wanted.get(name) is not None and wanted[name] != value
    ]
    return f"the model that is served has {'; '.join(other)}" if other else None
