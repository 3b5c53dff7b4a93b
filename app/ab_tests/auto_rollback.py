"""Automatic rollback of a version with a lower click-through than the version before.

The module is optional. Only the worker imports it, and only if NCR_RETURN_DROP is above 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.ab_tests.impressions import ClickCounts, ClickThroughStatistics
from app.ab_tests.repository import ABTestRepository
from app.core.database import Database
from app.core.errors import Conflict
from app.core.ids import hour_now
from app.core.logging import get_logger
from app.core.settings import Settings
from app.registry.schemas import Activation, ActivationChange
from app.registry.service import ModelRegistry
from ncr_core.online import ClickThroughDrop, click_through_drop

log = get_logger(__name__)

WINDOW_HOURS = 7 * 24
"""The number of hours before and after a version's activation whose lists count. The window is a
whole week, because weekdays differ. A later drop has other causes than the new version."""
MAX_P = 0.01
HOUR_US = 3_600_000_000


def significant_drop(
    before: Mapping[int, ClickCounts],
    since: Mapping[int, ClickCounts],
    usual: Mapping[int, ClickCounts],
    settings: Settings,
) -> ClickThroughDrop | None:
    """The drop that justifies a rollback of a version; None without one.

    See `ncr_core.online`.

    Args:
        before: counts by hour of the previous version.
        since: counts by hour of the new version.
        usual: counts by hour of all other versions, which show the variation between hours.
        settings: the smallest drop and the smallest number of lists.
    """
    drop = click_through_drop(_rows(before), _rows(since), _rows(usual), 2 * settings.return_lists)
    if drop is None or min(drop.lists, drop.lists_before) < settings.return_lists:
        return None
    return drop if drop.relative_drop >= settings.return_drop and drop.p < MAX_P else None


class AutoRollback:
    """Watches the click-through of a version that a training activated.

    A version that an administrator activated, rolled back to or pinned stays active.
    """

    def __init__(
        self,
        database: Database,
        models: ModelRegistry,
        click_through: ClickThroughStatistics,
        settings: Settings,
    ) -> None:
        self._repository = ABTestRepository(database)
        self._models = models
        self._click_through = click_through
        self._settings = settings

    async def check(self, now: int | None = None) -> Activation | None:
        """Rolls back to the previous version after a drop; returns the activation, or None.

        Any number of workers may check at the same time, but only one rolls back.

        Args:
            now: the hour, in hours since 1970; by default the current one.
        """
        settings = self._settings
        change = await self._publication() if settings.return_drop > 0 else None
        if change is None or change.version is None or change.previous is None:
            return None
        drop = await self._drop(change, hour_now() if now is None else now)
        if drop is None:
            return None
        detail = _detail(change.version, drop)
        try:
            activation = await self._models.activate(
                change.previous, "returned", detail, if_active=change.version
            )
        except Conflict as error:
            log.warning("automatic rollback refused", reason=error.detail, **detail)
            return None
        log.warning("rolled back automatically", version=activation.version, **detail)
        return activation

    async def _publication(self) -> ActivationChange | None:
        """The change by which training activated the active version, unless it is pinned."""
        activation = await self._models.activation()
        if activation.version is None or activation.pinned:
            return None
        changes, _ = await self._models.history(activation.version)
        # Pinning and unpinning are recorded too, but do not change the active version.
        last = next((each for each in changes if each.previous != each.version), None)
        return last if last is not None and last.reason == "published" else None

    async def _drop(self, change: ActivationChange, now: int) -> ClickThroughDrop | None:
        settings, published = self._settings, change.at // HOUR_US
        # Old and new lists are counted with the clicks of the same time after their hour.
        wait = settings.return_wait_hours
        until = min(now - wait, published + WINDOW_HOURS)
        if now > published + WINDOW_HOURS + wait + 24:
            return None
        excluded = await self._trial_hours(published - WINDOW_HOURS, until)
        by_hour = self._click_through.by_hour
        since = _without(await by_hour(str(change.version), published, until, wait), excluded)
        if sum(counts.lists for counts in since.values()) < settings.return_lists:
            return None
        window = published - WINDOW_HOURS, min(published + 1, now - wait)
        before = _without(await by_hour(str(change.previous), *window, wait), excluded)
        usual: dict[int, ClickCounts] = {}
        for version in await self._repository.versions_with_lists(*window):
            if version != change.version:
                for hour, counts in (await by_hour(version, *window, wait)).items():
                    usual[hour] = usual.get(hour, ClickCounts(0, 0)).plus(counts)
        return significant_drop(before, since, _without(usual, excluded), settings)

    async def _trial_hours(self, first: int, after: int) -> set[int]:
        """The hours of trials whose lists users saw.

        In these hours, the share of new users is higher among the users who get a version's own
        lists.
        """
        periods = await self._repository.shown_periods(first * HOUR_US, after * HOUR_US)
        return {
            hour for start, end in periods for hour in range(start // HOUR_US, end // HOUR_US + 1)
        }


def _without(hours: Mapping[int, ClickCounts], excluded: set[int]) -> dict[int, ClickCounts]:
    return {hour: counts for hour, counts in hours.items() if hour not in excluded}


def _rows(hours: Mapping[int, ClickCounts]) -> NDArray[np.int64]:
    rows = [(hour, *counts) for hour, counts in sorted(hours.items()) if counts.lists]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _detail(version: str, drop: ClickThroughDrop) -> dict[str, object]:
    """The detail for the history."""
    return {
        "from": version,
        "lists": drop.lists,
        "clicked": drop.clicked,
        "expected": round(drop.expected, 1),
        "fall": round(drop.relative_drop, 4),
        "lists_before": drop.lists_before,
        "p": drop.p,
    }
