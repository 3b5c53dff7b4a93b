"""What the rest of the service asks of trials, and of what was served."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.core.settings import Settings
from app.events.attribution import Attribution
from app.models.schemas import Activation
from app.models.service import ModelRegistry
from app.models.told import deleted, told_of
from app.trials.click_through import ClickThrough
from app.trials.observed import Observed
from app.trials.reports import Reports
from app.trials.repository import TrialRepository
from app.trials.returning import Returning
from app.trials.schemas import RunningTrial, TrialParams, TrialRow
from ncr_core.errors import CheckpointError
from ncr_core.evaluation.agreement import overlap, rank_biased_overlap

log = get_logger(__name__)

WRITE_SECONDS = 0.5
COUNT_EVERY = 10  # writes of impressions: what is only counted need not be there at once
CLOSE_SECONDS = 1.5  # twice: for a write under way, and for the last one
KEPT_DAYS = 30
LONGEST_DAYS, MOST_LISTS = 28, 1_000_000  # of a trial: more would tell nothing more
COUNT_SECONDS = 300.0  # between two counts of so many rows
DAY_US = 86_400_000_000
FORGET_ROWS = 5_000
_HASHES = 2**64


class TrialService:
    """Trials of a second version beside the one that is served. `start()` in a server, which then
    follows what others begin and end; `close()` at the end of everything.
    """

    def __init__(
        self,
        database: Database,
        models: ModelRegistry,
        attribution: Attribution,
        settings: Settings,
    ) -> None:
        self.interleaving: RunningTrial | None = None
        """The trial in which lists are drafted from both versions; None while there is none."""
        self.shadow: RunningTrial | None = None
        """The trial in which requests are also ranked by the other version; None as above."""
        self.observed = Observed(database)
        self._models = models
        self._repository = TrialRepository(database)
        self.clicks = ClickThrough(self._repository, attribution, self.observed)
        self._reports = Reports(self._repository, attribution)
        self._returning = Returning(models, self._repository, self.clicks, settings)
        self._poll_seconds = settings.model_poll_seconds
        self._others = settings.trial_models
        self._counted_at = -math.inf
        self._random = random.Random()  # noqa: S311 - who takes part is no secret
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # What requests ask and tell: nothing here waits.

    def takes_part(self, trial: RunningTrial, user: str) -> bool:
        """Whether a request takes part. In an interleaving a user always does, or never."""
        if trial.kind == "shadow":
            return self._random.random() < trial.share
        digest = hashlib.blake2b(
            f"{trial.trial_id}\0{user}".encode("utf-8", "surrogatepass"), digest_size=8
        ).digest()
        return int.from_bytes(digest, "big") < trial.share * _HASHES

    def served(self, version: str, n: int = 1) -> None:
        """Counts lists that were given out with a recommendation id of this version's."""
        self.observed.served(version, n)

    def record(
        self,
        recommendation_id: str,
        trial: RunningTrial,
        user_id: int | None,
        team_a: Sequence[int],
        team_b: Sequence[int],
    ) -> None:
        """Keeps which version put which item (the catalogue's ids) into an interleaved list."""
        self.observed.impression(
            recommendation_id, trial.trial_id, user_id, list(team_a), list(team_b)
        )

    def observe_shadow(
        self, trial: RunningTrial, ids_a: Sequence[int], ids_b: Sequence[int]
    ) -> None:
        """Adds up how far the two versions' lists for one request agree."""
        same_first = bool(ids_a) and bool(ids_b) and ids_a[0] == ids_b[0]
        values = {
            "requests": 1.0,
            "overlap": overlap(ids_a, ids_b),
            "same_first": float(same_first or not (ids_a or ids_b)),
            "rbo": rank_biased_overlap(ids_a, ids_b),
        }
        self.observed.sums(trial.trial_id, values)

    # In the background.

    async def start(self) -> None:
        """Learns what runs, and begins to follow it and to write what is observed."""
        await self.refresh()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._write())]

    async def close(self) -> None:
        """Ends the background, and writes what has been observed, if the database is there."""
        self._stopping.set()
        if self._tasks:
            # Not cancelled at once: of a write that is cut off it cannot be told if it was done.
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
        self._tasks = []
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.flush()
        except Exception as error:
            log.warning("observations lost", error=_first_line(error))

    async def refresh(self) -> None:
        """Learns which trials run."""
        running = {trial.kind: trial for trial in await self._repository.running()}
        self.interleaving, self.shadow = running.get("interleaving"), running.get("shadow")

    async def flush(self) -> None:
        """Writes what has been observed in this process."""
        await self.observed.write()

    async def _follow(self) -> None:
        while not await self._stopped(self._poll_seconds):
            try:
                await self.refresh()
            except Exception as error:
                log.warning("trials cannot be read", error=_first_line(error))

    async def _write(self) -> None:
        turns = 0
        while not await self._stopped(WRITE_SECONDS):
            turns += 1
            try:
                await self.observed.write_impressions()
                if turns % COUNT_EVERY == 0:
                    await self.observed.write_counts()
            except Exception as error:
                log.warning("observations wait", error=_first_line(error))

    async def _stopped(self, within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), within)
        return self._stopping.is_set()

    # What administrators do.

    async def begin(self, params: TrialParams) -> TrialRow:
        """Begins a trial of a version beside the active one.

        Raises NotFound `unknown_model`, Unprocessable `same_version`, Conflict `no_trials`,
        `no_active_model`, `deleted_model`, `checkpoint_damaged`, `trial_running`; Unavailable.
        """
        if self._others == 0:
            raise Conflict(
                "NCR_TRIAL_MODELS is 0: no version is loaded beside the one that is served",
                code="no_trials",
            )
        await self.end_outdated()
        row = await self._models.get(params.version)
        active = (await self._models.activation()).version
        if active is None:
            raise Conflict("no model is served that it could be beside", code="no_active_model")
        if row.version == active:
            raise Unprocessable(
                "version: this is the version that is served, and a trial takes two",
                code="same_version",
            )
        if row.status == "deleted":
            raise deleted(row.version)
        await self._check(row.version)
        trial = TrialRow(
            trial_id=f"trial-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
            kind=params.kind,
            version_a=active,
            version_b=row.version,
            share=params.share,
            status="running",
            created_at=now_us(),
            ended_at=None,
            report=None,
        )
        try:
            await self._repository.insert(trial)
        except IntegrityError:
            raise Conflict(
                f"a trial of this kind runs already: {params.kind}", code="trial_running"
            ) from None
        log.info("trial began", **{n: v for n, v in trial._asdict().items() if n != "report"})
        await self.refresh()
        return trial

    async def _check(self, version: str) -> None:
        # As before an activation: servers could only say in their logs that they cannot load it.
        try:
            await self._models.local_folder(version)
        except CheckpointError as error:
            raise told_of(error) from None

    async def get(self, trial_id: str) -> TrialRow:
        """A trial, with its report so far if it runs; 404 if there is none."""
        row = await self._row(trial_id)
        if row.status == "ended":
            return row
        return row._replace(report=await self._report(row))

    async def page(self, offset: int, n: int) -> tuple[list[TrialRow], int | None]:
        """Trials, newest first, and where the next page begins."""
        rows = await self._repository.page(offset, n + 1)
        return rows[:n], offset + n if len(rows) > n else None

    async def end(self, trial_id: str, note: str = "stopped") -> TrialRow:
        """Ends a trial and keeps its report; 409 if it has ended."""
        row = await self._row(trial_id)
        report = await self._report(row) | {"ended": note}
        if not await self._repository.end(trial_id, report):
            raise Conflict("the trial has ended already", code="trial_ended")
        log.info("trial ended", trial_id=trial_id, note=note)
        await self.refresh()
        return await self._row(trial_id)

    async def end_outdated(self) -> None:
        """Ends the trials whose first version is not the one that is served now, and those that
        went on for so long, or for so many lists, that more would tell nothing.
        """
        active = (await self._models.activation()).version
        for trial in await self._repository.running():
            note = await self._outdated(trial, active)
            if note is not None:
                try:
                    await self.end(trial.trial_id, note)
                except Conflict:
                    continue  # another worker was first

    async def _outdated(self, trial: RunningTrial, active: str | None) -> str | None:
        """Why it should not go on; None if it may."""
        if trial.version_a != active:
            return f"{trial.version_a} is not served any more, but {active}"
        if (await self._models.get(trial.version_b)).status == "deleted":
            return f"the files of {trial.version_b} were removed"
        if now_us() - trial.created_at > LONGEST_DAYS * DAY_US:
            return f"it went on for {LONGEST_DAYS} days"
        if trial.kind == "interleaving" and time.monotonic() > self._counted_at + COUNT_SECONDS:
            self._counted_at = time.monotonic()
            lists = await self._repository.count_impressions(trial.trial_id)
            if lists >= MOST_LISTS:
                return f"{lists:,} lists were interleaved"
        return None

    async def forget(self) -> None:
        """Removes the lists of trials that ended long ago: their reports are kept."""
        before = now_us() - KEPT_DAYS * DAY_US
        full = True
        while full:
            full = await self._repository.forget(before, FORGET_ROWS) == FORGET_ROWS
            await asyncio.sleep(0)  # others write, too

    async def in_use(self) -> set[str]:
        """The versions that trials need."""
        return {v for t in await self._repository.running() for v in (t.version_a, t.version_b)}

    async def erase(self, conn: AsyncConnection, user_id: int) -> None:
        """Removes what trials know of a user, in the transaction that erases them."""
        await self._repository.erase(conn, user_id)

    async def click_through(self, version: str) -> dict[str, Any]:
        """Lists of a version that were given out, those that were clicked, and their share."""
        return await self.clicks.of(version)

    async def return_check(self, now: int | None = None) -> Activation | None:
        """Returns to the version before if the new one is clicked less; see `Returning.check`."""
        return await self._returning.check(now)

    async def _row(self, trial_id: str) -> TrialRow:
        row = await self._repository.get(trial_id)
        if row is None:
            raise NotFound("there is no such trial", code="unknown_trial")
        return row

    async def _report(self, row: TrialRow) -> dict[str, Any]:
        await self.flush()
        return await self._reports.of(row)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
