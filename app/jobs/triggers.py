"""What starts a training by itself: a schedule, and a number of new events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from app.core.database import Database
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.core.schedule import Schedule
from app.core.settings import Settings
from app.jobs.schemas import Trigger
from app.jobs.service import JobService
from app.jobs.trigger_rows import Fired, TriggerRows

log = get_logger(__name__)

EVENTS = "events"

Seq = Callable[[], Awaitable[int]]


class Triggers:
    """Looks whether a training is due. Any number of workers may look at once: it is queued once.

    What falls due while a training runs, which does not know the latest events, waits for its end.
    While one is queued, that will do: it will read everything up to when it begins.
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
        """``last_seq`` is the events'; ``trained_seq`` that up to which the last model was trained,
        0 if there is none; ``now`` in microseconds since 1970.
        """
        self._rows = TriggerRows(database)
        self._jobs = jobs
        self._last_seq = last_seq
        self._trained_seq = trained_seq
        self._now = now
        self._every = settings.train_every
        text = settings.train_schedule
        self._schedule = None if text is None else Schedule.parse(text)
        # Another schedule is another trigger: it has missed nothing before it was set.
        self._scheduled = " ".join(["schedule", *(text or "").lower().split()])

    async def fire(self) -> str | None:
        """Queues a training if one is due; its job id."""
        names = [self._scheduled] * (self._schedule is not None) + [EVENTS] * (self._every > 0)
        if not names:
            return None
        fired = await self._rows.fired()
        if fired.keys() != set(names):
            await self._rows.replace(names, Fired(self._now(), 0))
            fired = await self._rows.fired()
        seq, trained = await self._last_seq(), await self._trained_seq()
        if not any(self._due(name, fired.get(name), seq, trained) for name in names):
            return None
        order = {name: await self._jobs.order(_kind(name)) for name in names}
        async with self._rows.database.write() as conn:
            fired = await self._rows.lock(conn)
            name = next((n for n in names if self._due(n, fired.get(n), seq, trained)), None)
            waiting = await self._rows.trainings(conn)
            if name is None or "running" in waiting:
                return None
            for other in names:  # this training serves all of them
                await self._rows.write(conn, other, Fired(self._now(), seq))
            if waiting:
                return None
            job_id = await self._jobs.queue(order[name], conn)
        log.info("training triggered", job_id=job_id, trigger=_kind(name))
        return job_id

    def _due(self, name: str, fired: Fired | None, seq: int, trained: int) -> bool:
        if fired is None:
            return False
        if name == EVENTS:
            return seq - max(fired.seq, trained) >= self._every
        assert self._schedule is not None  # noqa: S101 - or there is no such trigger
        following = self._schedule.after(datetime.fromtimestamp(fired.at / 1e6, UTC))
        return following is not None and following.timestamp() * 1e6 <= self._now()


def _kind(name: str) -> Trigger:
    return "events" if name == EVENTS else "schedule"
