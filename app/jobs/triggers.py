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

EVENTS, SCHEDULE = "events", "schedule "
UNSEEN_DAYS = 7  # so long after it was due a schedule that nobody has looked at is nobody's

Seq = Callable[[], Awaitable[int]]


class Triggers:
    """Looks whether a training is due. Any number of workers may look at once: it is queued once.

    What falls due while a training is queued or runs waits for its end. It is done with if that
    training gives a model and began later: then it has read everything up to there. Workers may
    have other schedules than this one's: each sees to its own.
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
        self._scheduled = SCHEDULE + " ".join((text or "").lower().split())

    async def fire(self) -> str | None:
        """Queues a training if one is due; its job id."""
        names = [self._scheduled] * (self._schedule is not None) + [EVENTS] * (self._every > 0)
        if not names:
            return None
        fired = await self._rows.fired()
        missing = [name for name in names if name not in fired]
        outdated = [n for n in fired if n not in names and self._unseen(n, fired[n])]
        if missing or outdated:
            # What was tried, and failed, is not new to a trigger that was only set now.
            tried = max((row.seq for row in fired.values()), default=0)
            await self._rows.renew(missing, Fired(self._now(), tried), outdated)
            fired = await self._rows.fired()
        seq, trained = await self._last_seq(), await self._trained_seq()
        if not any(self._due(name, fired.get(name), seq, trained) for name in names):
            return None
        order = {name: await self._jobs.order(_kind(name)) for name in names}
        async with self._rows.database.write() as conn:
            fired = await self._rows.lock(conn)
            if await self._rows.under_way(conn):
                return None
            begun, trained = await self._rows.begun(conn), await self._trained_seq()
            for name in names:
                if name in fired and fired[name].at < begun:
                    fired[name] = fired[name]._replace(at=begun)
                    await self._rows.write(conn, name, fired[name])
            due = next((n for n in names if self._due(n, fired.get(n), seq, trained)), None)
            if due is None:
                return None
            for name in names:  # this training serves all of them
                await self._rows.write(conn, name, Fired(self._now(), seq))
            job_id = await self._jobs.queue(order[due], conn)
        log.info("training triggered", job_id=job_id, trigger=_kind(due))
        return job_id

    def _due(self, name: str, fired: Fired | None, seq: int, trained: int) -> bool:
        if fired is None:
            return False
        if name == EVENTS:
            return seq - max(fired.seq, trained) >= self._every
        assert self._schedule is not None  # noqa: S101 - or there is no such trigger
        return self._since(self._schedule, fired) >= 0

    def _since(self, schedule: Schedule, fired: Fired) -> float:
        """Microseconds since it was due after it last fired; negative if that is to come."""
        following = schedule.after(datetime.fromtimestamp(fired.at / 1e6, UTC))
        return -1 if following is None else self._now() - following.timestamp() * 1e6

    def _unseen(self, name: str, fired: Fired) -> bool:
        if not name.startswith(SCHEDULE):
            return False
        try:
            schedule = Schedule.parse(name.removeprefix(SCHEDULE))
        except ValueError:  # of another version of the service
            return False
        return self._since(schedule, fired) > UNSEEN_DAYS * 86_400e6


def _kind(name: str) -> Trigger:
    return "events" if name == EVENTS else "schedule"
