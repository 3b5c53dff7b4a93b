"""The worker: claims jobs and sees them through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from app.core.database import Database
from app.core.logging import get_logger
from app.core.settings import Settings
from app.jobs.child import LEASE_OVER
from app.jobs.chores import Chore, Chores
from app.jobs.outcomes import Cancelled, LostJob, Stalled, Stopped, TrainingFailed
from app.jobs.repository import Claim, JobRepository
from app.jobs.results import Results
from app.models.service import ModelRegistry

log = get_logger(__name__)

MAX_ATTEMPTS = 3
UPLOAD_LEASES = 10  # for so many leases' time an upload is tried: training it again costs more
SWEEP_SECONDS = 3600.0
PROGRESS_SECONDS = 0.2  # between two writes of progress: epochs may take milliseconds
LINE_BYTES = 2**20  # of the child's answers: its summary is the longest

OnProgress = Callable[[dict[str, Any]], None]


class Worker:
    """Runs one job at a time: a training, or the candidates for what was trained.

    That happens in a child process: a fresh interpreter, so that the memory it took is given back
    and the server beside it keeps answering.
    """

    def __init__(
        self,
        database: Database,
        models: ModelRegistry,
        settings: Settings,
        chores: Sequence[Chore] = (),
    ) -> None:
        self._database = database
        self._models = models
        self._settings = settings
        self._jobs = JobRepository(database)
        self._results = Results(database, models, precompute=settings.precompute_users > 0)
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
        self._lease_us = int(settings.job_lease_seconds * 1e6)
        sweep = Chore("sweep", SWEEP_SECONDS, models.sweep)
        self._chores = (sweep, *chores)

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set; a job under way then goes back into the queue."""
        log.info("worker started", owner=self._owner)
        chores = Chores(self._chores)
        chores.start()
        try:
            await self._work(stop)
        finally:
            await chores.stop()
        log.info("worker stopped", owner=self._owner)

    async def _work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                worked = await self.run_once(stop)
            except Exception as error:
                # The database may be away for a while; a worker outlives that.
                log.warning("the worker could not go on", error=str(error).partition("\n")[0])
                worked = False
            if not worked:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._settings.job_poll_seconds)

    async def run_once(
        self, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None
    ) -> bool:
        """Does the next job, if there is one."""
        claim = await self._jobs.claim(self._owner, self._lease_us, MAX_ATTEMPTS)
        if claim is None:
            return False
        log.info("job started", job_id=claim.job_id, attempt=claim.attempt)
        training = claim.kind == "train"
        version = self._models.new_version() if training else str(claim.params["version"])
        try:
            await self._run(claim, version, stop or asyncio.Event(), on_progress)
        except LostJob:
            log.warning("job lost to another worker", job_id=claim.job_id)
        except Stopped:
            await self._jobs.requeue(claim)
            log.info("job given back", job_id=claim.job_id)
        except Stalled:
            # Another attempt, as after a worker that died: a machine that is too slow for the job
            # would else begin it for ever.
            await self._jobs.abandon(claim)
            log.warning("job given up: this worker stood still", job_id=claim.job_id)
        except Cancelled:
            await self._end(claim, "cancelled")
        except TrainingFailed as error:
            await self._end(claim, "failed", error=str(error))
        except asyncio.CancelledError:
            await asyncio.shield(self._jobs.requeue(claim))
            raise
        except Exception:
            log.exception("job failed", job_id=claim.job_id)
            await self._end(claim, "failed", error="an unexpected error; the worker's log has it")
        else:
            return True
        if training:  # nothing refers to what an unfinished job may have written
            await self._models.discard(version)
        return True

    async def _end(self, claim: Claim, status: str, *, error: str | None = None) -> None:
        log.info("job ended", job_id=claim.job_id, status=status, error=error)

        async def finish() -> None:
            async with self._database.write() as conn:
                await self._jobs.finish(conn, claim, status, error=error)

        await self._with_patience(finish)

    async def _with_patience(self, write: Callable[[], Awaitable[None]]) -> None:
        """Tries a write of a job's end again while the database is away, for a lease's time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.job_lease_seconds
        while True:
            try:
                return await write()
            except SQLAlchemyError as error:
                if loop.time() > until:
                    raise
                log.warning("the database is away", error=str(error).partition("\n")[0])
                await asyncio.sleep(self._settings.job_poll_seconds)

    async def _run(
        self, claim: Claim, version: str, stop: asyncio.Event, on_progress: OnProgress | None
    ) -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app.jobs.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        try:
            assert child.stdin is not None  # noqa: S101 - it is a pipe
            child.stdin.write(self._order(claim, version, await self._expected(claim)))
            await child.stdin.drain()
            summary = await self._follow(child, claim, stop, on_progress)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if summary is None:
            raise Stopped
        end = self._results.model if claim.kind == "train" else self._results.candidates
        await self._with_patience(lambda: end(claim, version, summary))

    async def _expected(self, claim: Claim) -> dict[str, float] | None:
        """How long the phases of the model that is served took, if it is of the same kind."""
        try:
            row = await self._models.serving()
        except SQLAlchemyError:  # it can be done without
            return None
        if row is None:
            return None
        return row.metrics.get("seconds") if row.kind == claim.params.get("model") else None

    def _order(self, claim: Claim, version: str, expected: dict[str, float] | None) -> bytes:
        # Through a pipe: a command line shows to everyone on the machine, and this may hold the
        # database's password.
        order = {
            "kind": claim.kind,
            "params": claim.params,
            "device": self._settings.device,
            "version": version,
            "expected_s": expected,
            "gate_margin": self._settings.gate_margin,
            # Gone before the lease is over, and another worker's training begins.
            "patience_s": 0.8 * self._settings.job_lease_seconds,
            "folder": str(self._models.folder(version).resolve()),
            "upload_patience_s": UPLOAD_LEASES * self._settings.job_lease_seconds,
            "settings": {
                "data_dir": str(self._settings.data_dir.resolve()),
                "database_url": self._settings.effective_database_url,
                "checkpoint_store": self._settings.checkpoint_store,
                "candidates": self._settings.candidates,
                "precompute_users": self._settings.precompute_users,
                "feedback": self._settings.feedback,
                "feedback_half_life_days": self._settings.feedback_half_life_days,
            },
        }
        return json.dumps(order).encode() + b"\n"

    async def _follow(
        self,
        child: asyncio.subprocess.Process,
        claim: Claim,
        stop: asyncio.Event,
        on_progress: OnProgress | None,
    ) -> dict[str, Any] | None:
        """Reads the child's answers and keeps the lease; its summary, or None if told to stop."""
        assert child.stdout is not None  # noqa: S101 - it is a pipe
        beat = self._settings.job_lease_seconds / 3
        progress: dict[str, Any] | None = None  # what has not been written yet
        line = asyncio.ensure_future(child.stdout.readline())
        stopped = asyncio.ensure_future(stop.wait())
        beats = asyncio.get_running_loop().time()
        try:
            while True:
                await asyncio.wait(
                    {line, stopped},
                    timeout=min(beat, 1.0) if progress is None else PROGRESS_SECONDS,
                    return_when="FIRST_COMPLETED",
                )
                if stopped.done():
                    return None
                if line.done():
                    # What does not end in a new line was cut off with the process.
                    whole = line.result().endswith(b"\n")
                    message = json.loads(line.result()) if whole else None
                    if message is None:
                        code = await child.wait()
                        if code == LEASE_OVER:
                            raise Stalled
                        raise TrainingFailed(
                            f"the training process ended with exit code {code}"
                            + (": it was killed, perhaps for want of memory" if code == -9 else "")
                        )
                    if "done" in message:
                        done: dict[str, Any] = message["done"]
                        return done
                    if "failed" in message:
                        raise TrainingFailed(message["failed"])
                    progress = message["progress"]
                    if on_progress is not None:
                        on_progress(message["progress"])
                    line = asyncio.ensure_future(child.stdout.readline())
                now = asyncio.get_running_loop().time()
                since = now - beats
                if since >= min(beat, 2.0) or (progress and since >= PROGRESS_SECONDS):
                    beats = now
                    if child.stdin is not None:
                        child.stdin.write(b".")  # a worker that is stopped does not, and it ends
                    await self._beat(claim, progress)
                    progress = None
        finally:
            for task in (line, stopped):
                task.cancel()

    async def _beat(self, claim: Claim, progress: dict[str, Any] | None) -> None:
        try:
            cancel = await self._jobs.heartbeat(claim, self._lease_us, progress)
        except SQLAlchemyError as error:
            # Nobody else can take the job before the lease is over, and perhaps nobody does then:
            # the next heartbeat that gets through tells.
            log.warning("heartbeat failed", error=str(error).partition("\n")[0])
            return
        if cancel is None:
            raise LostJob
        if cancel:
            raise Cancelled
