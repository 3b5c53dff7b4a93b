"""Public interface of the jobs feature: submit, list and cancel jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.settings import Settings
from app.core.tables import Place, now_us
from app.jobs.repository import JobRepository
from app.jobs.schemas import ENDED, ExportParams, JobRow, Kind, TrainParams, Trigger
from app.registry.schemas import ModelRow
from app.webhooks.outbox import Outbox
from ncr_core.errors import ConfigError
from ncr_core.recipes import AUTO_RECIPE

MAX_QUEUED_TRAININGS = 100
MAX_QUEUED_EXPORTS = 20
DELETE_ROWS = 1000  # in one transaction
DAY_US = 86_400_000_000
_NAMES: dict[str, str] = {"train": "training", "export": "export"}
_SET_BY_REQUESTS = {"seed", "min_interactions", "force"}  # no setting decides what is left out


class JobService:
    """Durable jobs, which this service queues and a worker runs."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        serving_model: Callable[[], Awaitable[ModelRow | None]] | None = None,
    ) -> None:
        """``serving_model`` gives the served version, which a training may start from."""
        self._repository = JobRepository(database, Outbox.from_settings(settings))
        self._settings = settings
        self._serving_model = serving_model

    async def submit_training(
        self, params: TrainParams, by: str | None = None, idempotency_key: str | None = None
    ) -> str:
        """Queues a training and returns its job id.

        Args:
            params: The training.
            by: The id of the key that requests the training.
            idempotency_key: A second request of the same key with the same value gets the job of
                the first request, even if the defaults have changed.

        Raises:
            Conflict: The queue is full, or the first request with this value was for another job.
            Unprocessable: A requested warm start is impossible, the request has hyper-parameters
                beside the recipe ``auto``, or the hyper-parameters do not fit each other.
        """
        names = params.model_fields_set | _SET_BY_REQUESTS
        given = params.model_dump(include=names, exclude_none=True)
        job_id = _job_id_of(by, idempotency_key)
        if job_id is not None and await self._is_queued(job_id, "train", given):
            return job_id
        order = await self._complete(params, "request")
        return await self._submit("train", order, by, job_id, given, MAX_QUEUED_TRAININGS)

    async def submit_export(
        self, params: ExportParams, by: str | None = None, idempotency_key: str | None = None
    ) -> str:
        """Queues an export and returns its job id; arguments as for `submit_training`.

        Raises:
            Conflict: The queue is full, or the first request with this value was for another job.
        """
        order = params.model_dump()
        job_id = _job_id_of(by, idempotency_key)
        if job_id is not None and await self._is_queued(job_id, "export", order):
            return job_id
        return await self._submit("export", order, by, job_id, order, MAX_QUEUED_EXPORTS)

    async def _submit(
        self,
        kind: Kind,
        order: dict[str, Any],
        by: str | None,
        job_id: str | None,
        given: dict[str, Any],
        max_queued: int,
    ) -> str:
        try:
            return await self._repository.insert(
                kind, order, by=by, job_id=job_id, max_queued=max_queued
            )
        except IntegrityError:
            if job_id is None or not await self._is_queued(job_id, kind, given):
                raise
            return job_id

    async def _is_queued(self, job_id: str, kind: Kind, given: dict[str, Any]) -> bool:
        """Whether an earlier request has queued a job with these parameters."""
        job = await self._repository.get(job_id)
        if job is not None and (job.kind != kind or not given.items() <= job.params.items()):
            raise Conflict(
                f"an earlier request with this Idempotency-Key requested another {_NAMES[kind]}",
                code="idempotency_key_used",
            )
        return job is not None

    async def training_order(self, trigger: Trigger) -> dict[str, Any]:
        """The params of a training by the settings' defaults, for `enqueue`."""
        return await self._complete(TrainParams(), trigger)

    async def enqueue(self, order: dict[str, Any], conn: AsyncConnection) -> str:
        """Queues a training in the caller's transaction and returns its job id."""
        return await self._repository.insert("train", order, conn)

    async def _complete(self, params: TrainParams, trigger: Trigger) -> dict[str, Any]:
        """The params to store, with all defaults filled in."""
        if params.recipe == AUTO_RECIPE and (given := params.hyperparameters - {"seed"}):
            raise Unprocessable(
                f"recipe: auto chooses these parameters: {', '.join(sorted(given))}",
                code="recipe_chooses",
            )
        if params.start == "warm":
            serving = None if self._serving_model is None else await self._serving_model()
            try:
                problem = _warm_start_problem(serving, params)
            except ConfigError as error:
                raise Unprocessable(str(error), code="parameters_do_not_fit") from None
            if problem is not None or serving is None:
                raise Unprocessable(f"start: {problem}", code="cannot_start_warm")
            params = params.model_copy(update=_architecture(serving))
        # If only the settings ask for a warm start, the training finds out whether it can: the
        # served model's architecture must not become the default for ever.
        start = params.start or self._settings.train_start
        try:
            values = params.completed(
                self._settings.effective_default_recipe,
                model=self._settings.default_model,
                factors=self._settings.default_factors,
                users=self._settings.default_users,
            )
        except ConfigError as error:
            raise Unprocessable(str(error), code="parameters_do_not_fit") from None
        return values | {"start": start, "trigger": trigger}

    async def get(self, job_id: str) -> JobRow:
        """A job; raises NotFound if the job does not exist."""
        job = await self._repository.get(job_id)
        if job is None:
            raise NotFound("the job does not exist", code="unknown_job")
        return job

    async def page(self, below: Place | None, n: int) -> tuple[list[JobRow], Place | None]:
        """Jobs, newest first, and the place of the next page; None after the last page."""
        rows = await self._repository.page(below, n + 1)
        last = rows[n - 1] if len(rows) > n else None
        return rows[:n], None if last is None else Place(last.created_at, last.job_id)

    async def delete_old(self, stored: Collection[str]) -> None:
        """Deletes the jobs that ended more than ``keep_jobs_days`` ago.

        The jobs of ``stored`` model versions stay.
        """
        before = now_us() - int(self._settings.keep_jobs_days * DAY_US)
        deleted = DELETE_ROWS
        while deleted == DELETE_ROWS:
            deleted = await self._repository.delete_ended(before, stored, DELETE_ROWS)

    async def states(self) -> list[tuple[str, str, int, int]]:
        """`(kind, status, count, oldest created_at)` of all jobs."""
        return await self._repository.states()

    async def cancel(self, job_id: str) -> JobRow:
        """Cancels a job, and returns the job; a running job ends within seconds.

        Raises:
            NotFound: The job does not exist.
            Conflict: The job has ended.
        """
        job = await self.get(job_id)
        if job.status not in ENDED:
            await self._repository.request_cancel(job_id)
            job = await self.get(job_id)
            if job.status not in ENDED or job.cancel_requested:
                return job
        raise Conflict(f"the job has already ended: {job.status}", code="job_ended")


def _job_id_of(by: str | None, idempotency_key: str | None) -> str | None:
    """The id of the job that a key's requests with this value share; None without a value."""
    if idempotency_key is None:
        return None
    digest = hashlib.sha256(f"{by}\0{idempotency_key}".encode()).hexdigest()
    return f"key-{digest[:32]}"


def _architecture(row: ModelRow) -> dict[str, Any]:
    """The params that a warm start cannot change."""
    return {
        "model": row.kind,
        "factors": row.factors,
        "layers": row.params.get("layers", 4),
        "users": row.params.get("users") or "free",
    }


def _warm_start_problem(serving: ModelRow | None, params: TrainParams) -> str | None:
    """The reason why a training cannot start from the served model; None if it can.

    Raises ConfigError if the hyper-parameters do not fit the recipe.
    """
    if serving is None:
        return "a warm start needs a served model"
    requested = {name: getattr(params, name) for name in params.hyperparameters}
    if params.recipe and params.recipe != AUTO_RECIPE:
        requested = params.configured_recipe().public_values()
    differences = [
        f"{name} {value}, not {requested[name]}"
        for name, value in _architecture(serving).items()
        if name in requested and requested[name] != value
    ]
    return f"the served model has {'; '.join(differences)}" if differences else None
