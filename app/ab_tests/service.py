"""A/B tests: trials of a second version, or of other settings, against the served version."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.ab_tests.impressions import ClickThroughStatistics, ImpressionBuffer
from app.ab_tests.interleaving import InterleavingTrials
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import (
    ABTestRow,
    AnyABTestParams,
    Kind,
    RunningABTest,
    SettingsTestParams,
)
from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.logging import get_logger
from app.core.settings import Settings
from app.core.tables import Place, now_us
from app.registry.activation import checkpoint_unusable, version_deleted
from app.registry.service import ModelRegistry
from ncr_core.errors import CheckpointError

if TYPE_CHECKING:  # optional modules
    from app.ab_tests.settings_trials import SettingsTrials
    from app.ab_tests.shadow import ShadowTrials

log = get_logger(__name__)

WRITE_SECONDS = 0.5
WRITES_PER_COUNT = 10  # counts are written less often than impressions
CLOSE_SECONDS = 1.5  # twice: for a write in progress, and for the last one
KEEP_IMPRESSIONS_DAYS = 30  # after the end of their trial
MAX_TRIAL_DAYS, MAX_TRIAL_LISTS = 28, 1_000_000  # more would not change the result
COUNT_SECONDS = 300.0  # between two counts of so many rows
DAY_US = 86_400_000_000
DELETE_ROWS = 5_000


class TrialKind(Protocol):
    """A kind of trial, as the service needs it."""

    kind: Kind
    running: RunningABTest | None

    async def report(self, trial: ABTestRow) -> dict[str, Any]:
        """The report of a trial so far."""


class ABTestService:
    """Begins, follows, reports and ends trials.

    A server calls `start()` to follow the trials that other servers begin and end. `close()` writes
    the remaining records.
    """

    def __init__(
        self,
        database: Database,
        models: ModelRegistry,
        settings: Settings,
        impressions: ImpressionBuffer,
        click_through: ClickThroughStatistics,
        interleaving: InterleavingTrials,
        shadow: ShadowTrials | None = None,
        settings_trials: SettingsTrials | None = None,
    ) -> None:
        """Builds the service. Without an optional kind of trial, `begin` refuses the kind."""
        self.impressions = impressions
        self.click_through = click_through
        self.interleaving = interleaving
        self.shadow = shadow
        self.settings_trials = settings_trials
        kinds: list[TrialKind | None] = [interleaving, settings_trials, shadow]
        self.kinds = {each.kind: each for each in kinds if each is not None}
        self._models = models
        self._repository = ABTestRepository(database)
        self._poll_seconds = settings.model_poll_seconds
        self._max_versions = settings.trial_models
        self._next_count = -math.inf
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads the running trials, and starts the tasks that follow trials and write records."""
        await self.refresh()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._write())]

    async def close(self) -> None:
        """Stops the background tasks, and writes the remaining records if the database answers."""
        self._stopping.set()
        if self._tasks:
            # Not cancelled at once: nobody knows whether a cancelled write was committed.
            _, pending = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in pending:
                task.cancel()
        self._tasks = []
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.flush()
        except Exception as error:
            log.warning("impressions lost", error=_first_line(error))

    async def refresh(self) -> None:
        """Reads the running trials."""
        running = {trial.kind: trial for trial in await self._repository.running()}
        for name, kind in self.kinds.items():
            kind.running = running.get(name)

    async def flush(self) -> None:
        """Writes the records of this process."""
        await self.impressions.write()

    async def _follow(self) -> None:
        while not await self._stopped(self._poll_seconds):
            try:
                await self.refresh()
            except Exception as error:
                log.warning("trials cannot be read", error=_first_line(error))

    async def _write(self) -> None:
        writes = 0
        while not await self._stopped(WRITE_SECONDS):
            writes += 1
            try:
                await self.impressions.write_impressions()
                if writes % WRITES_PER_COUNT == 0:
                    await self.impressions.write_counts()
            except Exception as error:
                log.warning("impressions cannot be written yet", error=_first_line(error))

    async def _stopped(self, within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), within)
        return self._stopping.is_set()

    async def begin(self, params: AnyABTestParams) -> ABTestRow:
        """Begins a trial of a version or of settings against the active version.

        Raises:
            NotFound: `unknown_model`.
            Unprocessable: `same_version`, or a kind that is not installed.
            Conflict: `no_trials`, `no_active_model`, `deleted_model`, `checkpoint_damaged` or
                `trial_running`.
            Unavailable: the store of checkpoints does not answer.
        """
        if params.kind not in self.kinds:
            raise Unprocessable(f"kind: {params.kind} trials are not installed")
        if params.version is not None and self._max_versions == 0:
            raise Conflict(
                "NCR_TRIAL_MODELS is 0: servers load only the active version",
                code="no_trials",
            )
        await self.end_outdated()
        active = (await self._models.activation()).version
        other = active if params.version is None else await self._other(params.version, active)
        if active is None or other is None:
            raise Conflict("no version is active", code="no_active_model")
        settings, planned_lists, planned_clicked = None, None, None
        if params.kind == "interleaving":
            planned_clicked = params.planned_clicked
        if isinstance(params, SettingsTestParams):
            given = params.settings
            settings = {} if given is None else given.model_dump(exclude_unset=True)
            planned_lists = params.planned_lists
        trial = ABTestRow(
            trial_id=f"trial-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
            kind=params.kind,
            version_a=active,
            version_b=other,
            share=params.share,
            status="running",
            created_at=now_us(),
            ended_at=None,
            report=None,
            settings=settings,
            planned_lists=planned_lists,
            planned_clicked=planned_clicked,
        )
        try:
            await self._repository.insert(trial)
        except IntegrityError:
            raise Conflict(
                f"another {params.kind} trial is running", code="trial_running"
            ) from None
        log.info("trial began", trial_id=trial.trial_id, kind=trial.kind, version=trial.version_b)
        await self.refresh()
        return trial

    async def _other(self, version: str, active: str | None) -> str:
        """The version to test, after checks of its status and files."""
        row = await self._models.get(version)
        if active is None:
            raise Conflict("no version is active", code="no_active_model")
        if row.version == active:
            raise Unprocessable(
                "version: a trial needs another version than the active one",
                code="same_version",
            )
        if row.status == "deleted":
            raise version_deleted(row.version)
        await self._check_files(row.version)
        return row.version

    async def _check_files(self, version: str) -> None:
        # Checked as before an activation: servers could only log that they cannot load it.
        try:
            await self._models.local_folder(version)
        except CheckpointError as error:
            raise checkpoint_unusable(error) from None

    async def get(self, trial_id: str) -> ABTestRow:
        """A trial, with a preliminary report if the trial is running. Raises NotFound."""
        row = await self._row(trial_id)
        return row if row.status == "ended" else row._replace(report=await self._report(row))

    async def page(self, below: Place | None, n: int) -> tuple[list[ABTestRow], Place | None]:
        """Trials, newest first, and the place of the next page; None after the last page."""
        rows = await self._repository.page(below, n + 1)
        last = rows[n - 1] if len(rows) > n else None
        return rows[:n], None if last is None else Place(last.created_at, last.trial_id)

    async def end(self, trial_id: str, reason: str = "stopped") -> ABTestRow:
        """Ends a trial and stores its report. Raises NotFound, and Conflict `trial_ended`."""
        row = await self._row(trial_id)
        report = await self._report(row) | {"ended": reason}
        if not await self._repository.end(row.kind, trial_id, report):
            raise Conflict("the trial has already ended", code="trial_ended")
        log.info("trial ended", trial_id=trial_id, reason=reason)
        await self.refresh()
        return await self._row(trial_id)

    async def end_outdated(self) -> None:
        """Ends trials whose versions changed, and trials at a limit of days or lists."""
        active = (await self._models.activation()).version
        for trial in await self._repository.running():
            reason = await self._reason_to_end(trial, active)
            if reason is not None:
                with contextlib.suppress(Conflict):  # another worker was first
                    await self.end(trial.trial_id, reason)

    async def _reason_to_end(self, trial: RunningABTest, active: str | None) -> str | None:
        if trial.version_a != active:
            return f"the active version changed from {trial.version_a} to {active}"
        if (await self._models.get(trial.version_b)).status == "deleted":
            return f"the files of {trial.version_b} were deleted"
        if now_us() - trial.created_at > MAX_TRIAL_DAYS * DAY_US:
            return f"the trial ran for {MAX_TRIAL_DAYS} days"
        if trial.kind == "interleaving" and time.monotonic() > self._next_count:
            self._next_count = time.monotonic() + COUNT_SECONDS
            lists = await self._repository.count_impressions(trial.trial_id)
            if lists >= MAX_TRIAL_LISTS:
                return f"{lists:,} lists were interleaved"
        return None

    async def delete_old_impressions(self) -> None:
        """Deletes users' data of trials that ended more than 30 days ago. The reports stay."""
        ended_before = now_us() - KEEP_IMPRESSIONS_DAYS * DAY_US
        repository = self._repository
        for delete in (repository.delete_impressions, repository.delete_trial_lists):
            deleted = DELETE_ROWS
            while deleted == DELETE_ROWS:
                deleted = await delete(ended_before, DELETE_ROWS)
                await asyncio.sleep(0)  # lets others write between two groups

    async def erase(self, conn: AsyncConnection, user_id: int | None, user: str) -> int:
        """Deletes the data of a user, in the transaction that erases the user.

        Other servers may write counts of the last seconds afterwards. The service deletes these
        counts with the other counts of the trial.

        Args:
            conn: the connection of the transaction.
            user_id: the internal id; None for a user without events.
            user: the client's id.

        Returns:
            The number of deleted rows and counts.
        """
        forgotten = self.impressions.forget(user)
        return forgotten + await self._repository.erase(conn, user_id, user)

    async def merge_users(
        self, conn: AsyncConnection, user_id: int, user: str, into_id: int, into: str
    ) -> None:
        """Gives the data of a user to another user, in the transaction that merges the users.

        Args:
            conn: the connection of the transaction.
            user_id: the internal id.
            user: the client's id.
            into_id: the internal id of the user who stays.
            into: the client's id of the user who stays.
        """
        await self._repository.merge_users(conn, user_id, user, into_id, into)

    async def _row(self, trial_id: str) -> ABTestRow:
        row = await self._repository.get(trial_id)
        if row is None:
            raise NotFound("the trial does not exist", code="unknown_trial")
        return row

    async def _report(self, row: ABTestRow) -> dict[str, Any]:
        await self.flush()
        kind = self.kinds.get(row.kind)
        return {} if kind is None else await kind.report(row)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
