"""Triggers of trainings: a cron schedule, and a number of new events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from app.core.cron import CronSchedule
from app.core.database import Database
from app.core.logging import get_logger
from app.core.settings import Settings
from app.core.tables import now_us
from app.jobs.repository import Fired, TriggerRepository
from app.jobs.schemas import Trigger
from app.jobs.service import JobService

log = get_logger(__name__)

EVENTS, SCHEDULE_PREFIX = "events", "schedule "
OUTDATED_DAYS = 7  # an overdue schedule that no worker has checked for so long is deleted

Seq = Callable[[], Awaitable[int]]


class Triggers:
    """Queues a due training once, for any number of workers that check at the same time.

    A trigger that fires while a training is queued or running waits for the end of the training.
    The trigger is settled if that training gives a model and started later, because the training
    has then read all events up to the trigger. Each worker checks the triggers of its own settings.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        jobs: JobService,
        last_seq: Seq,
        trained_seq: Seq,
        now: Callable[[], int] = now_us,
    ) -> None:
        """Reads the triggers from the settings.

        Args:
            database: Holds the triggers.
            settings: ``train_schedule`` and ``train_every``.
            jobs: Queues the trainings.
            last_seq: Gives the events' last seq.
            trained_seq: Gives the seq up to which the last model was trained, 0 without a model.
            now: Gives the time in microseconds since 1970.
        """
        self._database = database
        self._repository = TriggerRepository(database)
        self._jobs = jobs
        self._last_seq = last_seq
        self._trained_seq = trained_seq
        self._now = now
        self._every = settings.train_every
        self._schedule: CronSchedule | None = None
        self._names: list[str] = []
        if settings.train_schedule is not None:
            self._schedule = CronSchedule.parse(settings.train_schedule)
            # Another schedule is another trigger: it has missed nothing before it was set.
            self._names.append(SCHEDULE_PREFIX + " ".join(settings.train_schedule.lower().split()))
        if self._every > 0:
            self._names.append(EVENTS)

    async def fire(self) -> str | None:
        """Queues a training if one is due, and returns its job id."""
        if not self._names:
            return None
        fired = await self._ensure_rows()
        seq, trained_seq = await self._last_seq(), await self._trained_seq()
        if not self._due(fired, seq, trained_seq):
            return None
        orders = {name: await self._jobs.training_order(_trigger(name)) for name in self._names}
        async with self._database.write() as conn:
            fired = await self._repository.lock(conn)
            if await self._repository.has_pending_training(conn):
                return None
            training_start = await self._repository.last_training_start(conn)
            for name in self._names:
                if name in fired and fired[name].time_us < training_start:
                    fired[name] = fired[name]._replace(time_us=training_start)
                    await self._repository.update(conn, name, fired[name])
            due = self._due(fired, seq, await self._trained_seq())
            if not due:
                return None
            for name in self._names:  # this training serves all of them
                await self._repository.update(conn, name, Fired(self._now(), seq))
            job_id = await self._jobs.enqueue(orders[due[0]], conn)
        log.info("training triggered", job_id=job_id, trigger=_trigger(due[0]))
        return job_id

    async def _ensure_rows(self) -> dict[str, Fired]:
        """The last firings of the triggers, after adding rows for this worker's new triggers.

        The method deletes outdated rows.
        """
        fired = await self._repository.last_fired()
        missing = [name for name in self._names if name not in fired]
        outdated = [
            name
            for name in fired
            if name not in self._names and self._is_outdated(name, fired[name])
        ]
        if not missing and not outdated:
            return fired
        # A new trigger by events starts at the last attempt, so a failed one is not repeated.
        last_seq = max((row.seq for row in fired.values()), default=0)
        await self._repository.replace(outdated, missing, Fired(self._now(), last_seq))
        return await self._repository.last_fired()

    def _due(self, fired: dict[str, Fired], seq: int, trained_seq: int) -> list[str]:
        """The names of the triggers that are due."""
        return [
            name
            for name in self._names
            if name in fired
            and (
                seq - max(fired[name].seq, trained_seq) >= self._every
                if name == EVENTS
                else self._overdue_us(self._schedule, fired[name]) >= 0
            )
        ]

    def _overdue_us(self, schedule: CronSchedule | None, fired: Fired) -> float:
        """Microseconds since the schedule was due after it last fired; negative before that."""
        last = datetime.fromtimestamp(fired.time_us / 1e6, UTC)
        due = None if schedule is None else schedule.after(last)
        return -1 if due is None else self._now() - due.timestamp() * 1e6

    def _is_outdated(self, name: str, fired: Fired) -> bool:
        if not name.startswith(SCHEDULE_PREFIX):
            return False
        try:
            schedule = CronSchedule.parse(name.removeprefix(SCHEDULE_PREFIX))
        except ValueError:  # of another version of the service
            return False
        return self._overdue_us(schedule, fired) > OUTDATED_DAYS * 86_400e6


def _trigger(name: str) -> Trigger:
    return "events" if name == EVENTS else "schedule"
