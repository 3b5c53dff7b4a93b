"""What the rest of the service asks of jobs."""

from __future__ import annotations

from app.core.database import Database
from app.core.errors import Conflict, NotFound
from app.core.settings import Settings
from app.jobs.repository import JobRepository
from app.jobs.schemas import ENDED, JobRow, TrainParams


class JobService:
    """Durable jobs: submitted here, done by a worker."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._repository = JobRepository(database)
        self._settings = settings

    async def submit_training(self, params: TrainParams) -> str:
        """Queues a training and returns its job id."""
        values = params.model_dump()
        values["model"] = values["model"] or self._settings.default_model
        values["factors"] = values["factors"] or self._settings.default_factors
        return await self._repository.insert("train", values)

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
        return await self.get(job_id)
