"""The worker: runs each job in a child process, and repeats maintenance beside the jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import AWAY, Database
from app.core.logging import get_logger
from app.core.settings import Settings
from app.core.tables import now_us
from app.jobs.repository import Claim, JobRepository
from app.jobs.schemas import (
    ExportParams,
    ExportTask,
    PrecomputeTask,
    Task,
    TaskSettings,
    TrainingTask,
    TrainOrder,
)
from app.jobs.triggers import Triggers
from app.registry.exports import ExportStore, discard
from app.registry.schemas import ModelRow
from app.registry.service import ModelRegistry, open_export_store
from app.webhooks.delivery import WebhookDelivery
from app.webhooks.outbox import Outbox
from app.wiring import Services
from app.worker.child_process import (
    Cancelled,
    Heartbeat,
    Interrupted,
    LostJob,
    OnProgress,
    Stalled,
    Stopped,
    TrainingFailed,
    clock,
    run_in_child,
)
from ncr_core.recipes import AUTO_RECIPE

log = get_logger(__name__)

Params = TypeVar("Params", bound=BaseModel)

MAX_ATTEMPTS = 3
UPLOAD_LEASES = 10  # how long a child retries: training again would cost more
AWAY_LEASES = 10  # how long a child goes on while its lease cannot be renewed
WATCHDOG_LEASES = 0.8  # the child is gone before its lease is over and another training starts
MAX_HEARTBEAT_SECONDS = 2.0
SWEEP_SECONDS = 3600.0
TRIGGERS_SECONDS = 5.0
CLEAN_SECONDS = 600.0
END_TRIALS_SECONDS = 10.0
ROLLBACK_SECONDS = 300.0  # the click-through rates that it compares change once an hour
FORGET_SECONDS = 3600.0
ALIVE_SECONDS = 5.0
WEBHOOK_SECONDS = 1.0
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class PeriodicTask:
    """Work that a running worker repeats ``every_s`` seconds after its last end.

    Every worker repeats the work, perhaps at the same moment, so a second run must be harmless.
    Jobs never wait for the work.
    """

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]


class PeriodicTasks:
    """Runs each periodic task in an asyncio task of its own."""

    def __init__(self, tasks: Sequence[PeriodicTask]) -> None:
        self._periodic_tasks = tasks
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Runs every periodic task at once, then at its interval."""
        self._running = {asyncio.create_task(_repeat(task)) for task in self._periodic_tasks}

    async def stop(self) -> None:
        """Cancels the running tasks. Each task must tolerate the end, like a power cut."""
        for running in self._running:
            running.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._running = set()


async def _repeat(task: PeriodicTask) -> None:
    while True:
        try:
            await task.run()
        except Exception as error:
            # The database may be away for a while; the next run may succeed.
            reason = str(error).partition("\n")[0]
            log.warning("periodic task failed", task=task.name, error=reason)
        await asyncio.sleep(task.every_s)


@dataclass(slots=True, eq=False)
class _Lease:
    """This worker's view of its lease on a job, with times by `clock`, in seconds."""

    seconds: float
    renewed: float
    """The start of the claim or of the last successful renewal. The lease starts no earlier."""

    def exit_at(self, begun: float) -> float:
        """The time at which a child has to exit, if its lease counts as renewed at ``begun``."""
        return begun + WATCHDOG_LEASES * self.seconds


class TaskRunner(Protocol):
    """Runs a task to its end; see `run_in_child`."""

    async def __call__(
        self,
        task: Task,
        heartbeat: Heartbeat,
        heartbeat_seconds: float,
        stop: asyncio.Event,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        """Returns the summary, or raises the other outcome of the task."""
        ...


class Worker:
    """Runs one job at a time: a training, an export, or the precomputation of candidates.

    A job runs in a child process, a fresh interpreter. The end of the child frees its memory, and
    the server beside the child keeps answering.
    """

    def __init__(
        self,
        database: Database,
        models: ModelRegistry,
        settings: Settings,
        periodic_tasks: Sequence[PeriodicTask] = (),
        *,
        run_task: TaskRunner = run_in_child,
        exports: ExportStore | None = None,
    ) -> None:
        """Builds a worker that is not running yet.

        Args:
            database: The database with the jobs.
            models: The registry that publishes trained models.
            settings: The settings of the service.
            periodic_tasks: The work to repeat beside the jobs while the worker runs.
            run_task: Runs a job's task.
            exports: The store of exports. The worker removes exports of cancelled and failed jobs.
        """
        self._database = database
        self._models = models
        self._settings = settings
        self._jobs = JobRepository(database, Outbox.from_settings(settings))
        self._run_task = run_task
        self._exports = exports
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
        self._lease_us = int(settings.job_lease_seconds * 1e6)
        sweep = PeriodicTask("sweep", SWEEP_SECONDS, models.sweep)
        self._periodic_tasks = PeriodicTasks((sweep, *periodic_tasks))

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set. A running job then goes back into the queue."""
        log.info("worker started", owner=self._owner)
        self._periodic_tasks.start()
        try:
            while not stop.is_set():
                try:
                    worked = await self.run_once(stop)
                except Exception as error:
                    # The database may be away for a while; a worker outlives that.
                    reason = str(error).partition("\n")[0]
                    log.warning("the worker failed", error=reason)
                    worked = False
                if not worked:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), self._settings.job_poll_seconds)
        finally:
            await self._periodic_tasks.stop()
        log.info("worker stopped", owner=self._owner)

    async def run_once(
        self, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None
    ) -> bool:
        """Runs the next job to its end; False if there is none.

        Raises:
            SQLAlchemyError: The database was unavailable at the claim, or for longer than a lease.
        """
        lease = _Lease(self._settings.job_lease_seconds, clock())
        claim = await self._jobs.claim(self._owner, self._lease_us, MAX_ATTEMPTS)
        if claim is None:
            return False
        log.info("job started", job_id=claim.job_id, attempt=claim.attempt)
        task: Task | None = None
        try:
            task = await self._task(claim, lease)
            summary = await self._run_task(
                task,
                lambda progress: self._heartbeat(claim, lease, progress),
                min(self._settings.job_lease_seconds / 3, MAX_HEARTBEAT_SECONDS),
                stop or asyncio.Event(),
                on_progress,
            )
            await self._retry(partial(self._publish, claim, task, summary))
        except LostJob:
            log.warning("job lost to another worker", job_id=claim.job_id)
        except (Stopped, asyncio.CancelledError) as outcome:
            requeue = asyncio.create_task(self._jobs.requeue(claim))
            try:
                await asyncio.wait({requeue})
            finally:  # a stop that takes too long cancels this, and not the requeue
                await requeue
            log.info("job requeued", job_id=claim.job_id)
            if isinstance(outcome, asyncio.CancelledError):
                raise
        except (Stalled, Interrupted) as outcome:
            # It counts as an attempt, as after a worker that died: a machine that is too slow for
            # the job, or whatever stops its processes, would else start it for ever.
            log.warning("job abandoned", job_id=claim.job_id, reason=str(outcome))
            await self._jobs.abandon(claim)
        except Cancelled:
            await self._end(claim, "cancelled")
            await self._discard_export(task)
        except TrainingFailed as error:
            await self._end(claim, "failed", error=str(error))
            await self._discard_export(task)
        except AWAY:
            # Nobody could be told how the job ended: once its lease is over it is taken up again.
            raise
        except Exception:
            log.exception("job failed", job_id=claim.job_id)
            await self._end(
                claim, "failed", error="an unexpected error; the log of the worker names the cause"
            )
        else:
            return True
        if isinstance(task, TrainingTask):  # nothing refers to what it may have written
            await self._models.discard(task.version)
        return True

    async def _discard_export(self, task: Task | None) -> None:
        """Removes the files that a killed child process has left of an ended export."""
        if isinstance(task, ExportTask) and self._exports is not None:
            await asyncio.to_thread(discard, self._exports, task.job_id)

    async def _publish(self, claim: Claim, task: Task, summary: dict[str, Any]) -> None:
        if isinstance(task, TrainingTask):
            await self.publish_model(claim, task.version, summary)
        elif isinstance(task, PrecomputeTask):
            await self.publish_candidates(claim, task.version, summary)
        else:
            await self.publish_export(claim, summary)

    async def _task(self, claim: Claim, lease: _Lease) -> Task:
        """The child's task for a claimed job. Raises TrainingFailed for invalid params."""
        lease_seconds = self._settings.job_lease_seconds
        common = {
            "device": self._settings.device,
            "exit_at": lease.exit_at(lease.renewed),
            "retry_seconds": UPLOAD_LEASES * lease_seconds,
            "settings": TaskSettings.from_settings(self._settings),
        }
        if claim.kind == "candidates":
            return PrecomputeTask.model_validate(common | {"version": claim.params["version"]})
        if claim.kind == "export":
            export = _checked(ExportParams, claim.params)
            return ExportTask.model_validate(common | {"job_id": claim.job_id, "params": export})
        if claim.kind != "train":
            raise TrainingFailed("the version of the worker is too old for this job")
        params = _checked(TrainOrder, claim.params)
        last = None
        with contextlib.suppress(SQLAlchemyError):  # only the estimated time left needs it
            last = await self._jobs.last_training()
        return TrainingTask.model_validate(
            common
            | {
                "version": self._models.new_version(),
                "params": params,
                "gate_margin": self._settings.gate_margin,
                "expected_seconds": _seconds_of_last(last, params),
            }
        )

    async def publish_model(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """Publishes a trained model and ends its job, in one transaction.

        Raises:
            LostJob: Another worker owns the job by now. The call writes nothing.
            Cancelled: A client has cancelled the job. The call writes nothing.
        """
        gate = summary["metrics"]["gate"]
        rejected = gate["decision"] == "rejected"
        params = claim.params | summary["architecture"]

        async def end_job(conn: AsyncConnection, row: ModelRow, served: bool) -> None:
            status = "rejected" if rejected else "succeeded"
            await self._finish(conn, claim, status, version, row.metrics)
            if served and self._settings.precompute_users > 0:
                await self._jobs.insert("candidates", {"version": version}, conn)

        row = ModelRow(
            version=version,
            status="rejected" if rejected else "published",
            kind=params["model"],
            factors=params["factors"],
            path=self._models.stored_path(version),
            checksum=summary["checksum"],
            trained_seq=summary["trained_seq"],
            users=summary["users"],
            items=summary["items"],
            interactions=summary["interactions"],
            metrics=summary["metrics"],
            params=params,
            job_id=claim.job_id,
            created_at=now_us(),
            activated_at=None,
        )
        detail = {"job_id": claim.job_id} | ({"forced": True} if gate["forced"] else {})
        reason = await self._models.publish(row, detail, end_job=end_job)
        log.info(
            "model rejected" if rejected else "model published",
            job_id=claim.job_id,
            version=version,
            served=reason is None,
            finding=gate["finding"],
            **({} if reason is None or rejected else {"why": reason}),
        )

    async def publish_candidates(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """Ends a job that has computed candidates; raises as `publish_model`."""
        async with self._database.write() as conn:
            await self._finish(conn, claim, "succeeded", version, summary)
        log.info("candidates computed", job_id=claim.job_id, version=version, **summary)

    async def publish_export(self, claim: Claim, summary: dict[str, Any]) -> None:
        """Ends a job whose files are in the store; raises as `publish_model`."""
        async with self._database.write() as conn:
            await self._finish(conn, claim, "succeeded", None, summary)
        log.info("export written", job_id=claim.job_id, folder=summary["folder"])

    async def _finish(
        self,
        conn: AsyncConnection,
        claim: Claim,
        status: str,
        version: str | None,
        metrics: dict[str, Any],
    ) -> None:
        if not await self._jobs.finish(conn, claim, status, model_version=version, metrics=metrics):
            raise Cancelled if await self._jobs.is_cancelled(conn, claim) else LostJob

    async def _heartbeat(
        self, claim: Claim, lease: _Lease, progress: dict[str, Any] | None
    ) -> float:
        """Renews the lease and writes progress; returns and raises as `Heartbeat`."""
        begun = clock()
        try:
            cancel = await self._jobs.heartbeat(claim, self._lease_us, progress)
        except SQLAlchemyError as error:
            # While the database is away for everybody nobody else takes the job: the next
            # heartbeat that gets through tells. Another worker that it is there for does.
            log.warning("heartbeat failed", error=str(error).partition("\n")[0])
            if begun - lease.renewed > AWAY_LEASES * lease.seconds:
                raise Stalled("the database was unavailable for too long") from None
            return lease.exit_at(begun)
        if cancel is None:
            raise LostJob
        if cancel:
            raise Cancelled
        lease.renewed = begun
        return lease.exit_at(begun)

    async def _end(self, claim: Claim, status: str, *, error: str | None = None) -> None:
        """Records a job that ended without a result."""
        log.info("job ended", job_id=claim.job_id, status=status, error=error)

        async def finish() -> None:
            async with self._database.write() as conn:
                await self._jobs.finish(conn, claim, status, error=error)

        await self._retry(finish)

    async def _retry(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retries a write while the database is unavailable, for the time of a lease."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.job_lease_seconds
        while True:
            try:
                return await write()
            except SQLAlchemyError as error:
                if loop.time() > deadline:
                    raise
                log.warning("the database is unavailable", error=str(error).partition("\n")[0])
                await asyncio.sleep(self._settings.job_poll_seconds)


def _checked(kind: type[Params], params: dict[str, Any]) -> Params:
    """A job's stored params. Raises TrainingFailed for invalid ones."""
    try:
        return kind.model_validate(params)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        reason = f"the parameters of the job are not valid: {where}: {problem['msg']}"
        raise TrainingFailed(reason) from None


def _seconds_of_last(
    last: tuple[dict[str, Any], dict[str, Any]] | None, params: TrainOrder
) -> dict[str, float] | None:
    """The seconds of each phase of the last training; None if that was of another kind."""
    if last is None:
        return None
    its_params, metrics = last[0], last[1] or {}
    if params.recipe == AUTO_RECIPE:
        alike = "tried" in metrics
    else:
        alike = its_params.get("model") == params.model_dump()["model"]
    seconds: dict[str, float] | None = metrics.get("seconds")
    return seconds if alike else None


def build_worker(services: Services) -> Worker:
    """A worker with its periodic tasks."""
    trials, models, settings = services.trials, services.models, services.settings
    triggers = Triggers(
        services.database, settings, services.jobs, services.events.last_seq, models.trained_seq
    )

    async def delete_old_jobs() -> None:
        await services.jobs.delete_old(await models.stored_versions())

    exports = open_export_store(settings)

    async def delete_old_exports() -> None:
        await models.claim_store()  # nothing is removed from the store of another database
        before = time.time() - settings.keep_exports_days * DAY_SECONDS
        await asyncio.to_thread(exports.remove_old, before)

    tasks = [
        PeriodicTask("exports", FORGET_SECONDS, delete_old_exports),
        PeriodicTask("jobs", FORGET_SECONDS, delete_old_jobs),
        PeriodicTask("triggers", TRIGGERS_SECONDS, triggers.fire),
        PeriodicTask("clean", CLEAN_SECONDS, models.clean),
        PeriodicTask("trials", END_TRIALS_SECONDS, trials.end_outdated),
        PeriodicTask("forget", FORGET_SECONDS, trials.delete_old_impressions),
        PeriodicTask("shown lists", FORGET_SECONDS, services.events.delete_old_shown_lists),
        PeriodicTask("throw-away users", FORGET_SECONDS, services.events.erase_throw_away_users),
        PeriodicTask("retractions", FORGET_SECONDS, services.events.delete_old_retractions),
    ]
    if settings.worker_alive_file is not None:
        touch = partial(asyncio.to_thread, settings.worker_alive_file.touch)
        tasks.append(PeriodicTask("alive", ALIVE_SECONDS, touch))
    if settings.webhook_targets:
        webhooks = WebhookDelivery(services.database, settings)
        tasks.append(PeriodicTask("webhooks", WEBHOOK_SECONDS, webhooks.deliver))
        tasks.append(PeriodicTask("old webhooks", FORGET_SECONDS, webhooks.delete_old))
    if settings.return_drop > 0:
        from app.ab_tests.auto_rollback import AutoRollback  # optional

        rollback = AutoRollback(services.database, models, trials.click_through, settings)
        tasks.append(PeriodicTask("return", ROLLBACK_SECONDS, rollback.check))
    return Worker(services.database, models, settings, tasks, exports=exports)
