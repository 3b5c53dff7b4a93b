"""Settings trials: a share of the users gets other settings, and reports compare click-through.

The module is optional. Only `app.wiring` constructs `SettingsTrials`. Without the
module, the service refuses trials of this kind.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from cachetools import LRUCache

from app.ab_tests.assignment import is_in_share, user_number
from app.ab_tests.impressions import ClickCounts, ImpressionBuffer
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ARMS, ABTestRow, Arm, Kind, RunningABTest
from app.core.database import Database
from app.events.click_attribution import ClickAttribution
from ncr_core.online import LEVEL, ArmCounts, click_through_difference

_SOURCE = re.compile(r"(trial-[0-9a-f-]{1,60})-([ab])")
MAX_KNOWN_TRIALS = 64
USERS_AT_ONCE = 2_000


class TrialArm(NamedTuple):
    """An arm of a settings trial, as its lists need it."""

    trial_id: str
    arm: Arm
    version: str
    """The version that ranks the lists of the arm."""
    settings: dict[str, Any]
    """The settings by name; empty in arm A."""

    @property
    def source(self) -> str:
        """The prefix of the recommendation ids and cursors of the arm's lists."""
        return source_of(self.trial_id, self.arm)


def source_of(trial_id: str, arm: Arm) -> str:
    """The prefix of the recommendation ids and cursors of an arm's lists."""
    return f"{trial_id}-{arm}"


class SettingsTrials:
    """Decides which users get the settings, counts the lists of both arms, and compares them."""

    kind: Kind = "settings"

    def __init__(
        self, database: Database, attribution: ClickAttribution, impressions: ImpressionBuffer
    ) -> None:
        self._repository = ABTestRepository(database)
        self._attribution = attribution
        self._impressions = impressions
        self._known: LRUCache[str, RunningABTest] = LRUCache(MAX_KNOWN_TRIALS)
        self.running: RunningABTest | None = None
        """The running trial, as `ABTestService.refresh` last read it."""

    def arm_of(self, trial: RunningABTest, user: str) -> TrialArm:
        """A user's arm: the same one in the whole trial, on every server."""
        return _arm(
            trial, "b" if is_in_share(user_number(trial.trial_id, user), trial.share) else "a"
        )

    async def find_arm(self, source: str) -> TrialArm | None:
        """The arm with a source, also of an ended trial; None for a source of no settings trial."""
        match = _SOURCE.fullmatch(source)
        if match is None:
            return None
        trial_id, arm = match[1], ARMS[match[2] == "b"]
        running = self.running
        if running is not None and running.trial_id == trial_id:
            return _arm(running, arm)
        trial = self._known.get(trial_id)
        if trial is None:
            row = await self._repository.get(trial_id)
            if row is None or row.kind != self.kind:
                return None
            trial = RunningABTest(*(getattr(row, name) for name in RunningABTest._fields))
            self._known[trial_id] = trial
        return _arm(trial, arm)

    def record(self, arm: TrialArm, user: str) -> None:
        """Counts a list of a user. Callers check first that the trial runs, see `is_running`."""
        self._impressions.add_lists(arm.source)
        number = user_number(arm.trial_id, user)
        self._impressions.add_trial_list(arm.trial_id, arm.arm, number)

    def is_running(self, arm: TrialArm) -> bool:
        """Whether the trial of an arm runs, so that lists count for the arm."""
        return self.running is not None and self.running.trial_id == arm.trial_id

    async def totals(self, trial_id: str) -> dict[Arm, ClickCounts]:
        """The lists and the clicked lists of each arm, as far as servers have written them.

        All clicks count here. The report counts only the clicks of users with lists.
        """
        lists = await self._repository.lists_by_arm(trial_id)
        return {
            arm: ClickCounts(
                lists.get(arm, (0, 0, 0))[1],
                await self._attribution.clicked(source_of(trial_id, arm)),
            )
            for arm in ARMS
        }

    async def report(self, trial: ABTestRow) -> dict[str, Any]:
        """Users, lists and clicked lists of both arms, and the difference of their rates."""
        served = await self._repository.lists_by_arm(trial.trial_id)
        counts = {
            arm: await self._counts(trial.trial_id, arm, *served.get(arm, (0, 0, 0)))
            for arm in ARMS
        }
        a, b = counts["a"], counts["b"]
        found = click_through_difference(a, b, trial.planned_lists or 1)
        both = a.plus(b)
        return {
            "users": both.users,
            "lists": both.lists,
            "clicked": both.clicked,
            **{
                arm: {
                    "users": each.users,
                    "lists": each.lists,
                    "clicked": each.clicked,
                    "rate": each.rate,
                }
                for arm, each in counts.items()
            },
            "difference": None if found is None else found.difference,
            "relative_difference": None if found is None else found.relative,
            "interval": None if found is None else list(found.interval),
            "level": LEVEL,
            "p": None if found is None else found.p,
            "better": None if found is None else found.better,
            "planned_lists": trial.planned_lists,
            "detectable": None if found is None else found.detectable,
        }

    async def _counts(
        self, trial_id: str, arm: Arm, users: int, lists: int, lists_squared: int
    ) -> ArmCounts:
        """The counts of an arm, with at most as many clicked lists of a user as served lists.

        The limit bounds the effect of forged ids, and of clicks on lists that a killed server lost.
        """
        clicked = clicked_squared = product = 0
        by_user = await self._attribution.clicked_by_user(source_of(trial_id, arm))
        numbers = {user_number(trial_id, user): n for user, n in by_user.items()}
        waiting = list(numbers)
        for start in range(0, len(waiting), USERS_AT_ONCE):
            some = waiting[start : start + USERS_AT_ONCE]
            found = await self._repository.lists_of_users(trial_id, arm, some)
            for number, own_lists in found.items():
                own = min(numbers[number], own_lists)
                clicked += own
                clicked_squared += own**2
                product += own * own_lists
        return ArmCounts(users, lists, clicked, lists_squared, clicked_squared, product)


def _arm(trial: RunningABTest, arm: Arm) -> TrialArm:
    if arm == "a":
        return TrialArm(trial.trial_id, arm, trial.version_a, {})
    return TrialArm(trial.trial_id, arm, trial.version_b, trial.settings or {})
