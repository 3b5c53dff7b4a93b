"""The automatic return: to the version before, if the new one's lists are clicked less."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.core.attribution import hour_now
from app.core.errors import Conflict
from app.core.logging import get_logger
from app.core.settings import Settings
from app.models.history import Change
from app.models.schemas import Activation
from app.models.service import ModelRegistry
from app.trials.click_through import Clicks, ClickThrough
from app.trials.repository import TrialRepository
from ncr_core.evaluation.falling import Fall, fall

log = get_logger(__name__)

WINDOW_HOURS = 7 * 24
"""So long before a version was published its forerunner's lists count, and so long after it its
own: whole weeks, as weekdays differ. What falls later has other reasons than the new version."""
P = 0.01
HOUR_US = 3_600_000_000


def fallen(
    before: Mapping[int, Clicks],
    since: Mapping[int, Clicks],
    usual: Mapping[int, Clicks],
    settings: Settings,
) -> Fall | None:
    """The fall that a version is taken back for, by clicks by hour; None where there is none.

    See `ncr_core.evaluation.falling`.
    """
    found = fall(_rows(before), _rows(since), _rows(usual), 2 * settings.return_lists)
    if found is None or min(found.lists, found.lists_before) < settings.return_lists:
        return None
    return found if found.relative >= settings.return_drop and found.p < P else None


class Returning:
    """Looks at the clicks of a version that training has published.

    Not at one that somebody activated, rolled back to or pinned: they had their reasons.
    """

    def __init__(
        self,
        models: ModelRegistry,
        repository: TrialRepository,
        clicks: ClickThrough,
        settings: Settings,
    ) -> None:
        self._models = models
        self._repository = repository
        self._clicks = clicks
        self._settings = settings

    async def check(self, now: int | None = None) -> Activation | None:
        """Returns to the version before if there is reason to, and then says what is active.

        ``now`` in hours since 1970. Any number of workers may do this at once: one returns.
        """
        settings = self._settings
        change = await self._published() if settings.return_drop > 0 else None
        if change is None or change.version is None or change.previous is None:
            return None
        found = await self._fall(change, hour_now() if now is None else now)
        if found is None:
            return None
        detail = _detail(change.version, found)
        try:
            activation = await self._models.activate(
                change.previous, "returned", detail, if_active=change.version
            )
        except Conflict as error:
            log.warning("no return to the version before", reason=error.detail, **detail)
            return None
        log.warning("returned to the version before", version=activation.version, **detail)
        return activation

    async def _published(self) -> Change | None:
        """How the active version came to be that; None unless by training, or if it is pinned."""
        activation = await self._models.activation()
        if activation.version is None or activation.pinned:
            return None
        changes, _ = await self._models.history(activation.version)
        # To pin a version and to let it go are changes, too, but not of what is served.
        last = next((each for each in changes if each.previous != each.version), None)
        return last if last is not None and last.reason == "published" else None

    async def _fall(self, change: Change, now: int) -> Fall | None:
        settings, began = self._settings, change.at // HOUR_US
        # Lists are counted with the clicks of a set time after their hour, the new as the old.
        wait = settings.return_wait_hours
        until = min(now - wait, began + WINDOW_HOURS)
        if now > began + WINDOW_HOURS + wait + 24:
            return None
        tried = await self._interleaved(began - WINDOW_HOURS, until)
        since = _without(await self._clicks.by_hour(str(change.version), began, until, wait), tried)
        if sum(each.lists for each in since.values()) < settings.return_lists:
            return None
        window = began - WINDOW_HOURS, min(began + 1, now - wait)
        before = _without(await self._clicks.by_hour(str(change.previous), *window, wait), tried)
        usual: dict[int, Clicks] = {}
        for version in await self._repository.versions(*window):
            for hour, own in (await self._clicks.by_hour(version, *window, wait)).items():
                if version != change.version:
                    usual[hour] = usual.get(hour, Clicks(0, 0)).and_(own)
        return fallen(before, since, _without(usual, tried), settings)

    async def _interleaved(self, first: int, after: int) -> set[int]:
        """The hours in which lists were interleaved: then a version's own lists are those of other
        people, with more newcomers among them.
        """
        times = await self._repository.interleaved(first * HOUR_US, after * HOUR_US)
        return {
            hour for start, end in times for hour in range(start // HOUR_US, end // HOUR_US + 1)
        }


def _without(hours: Mapping[int, Clicks], tried: set[int]) -> dict[int, Clicks]:
    return {hour: each for hour, each in hours.items() if hour not in tried}


def _rows(hours: Mapping[int, Clicks]) -> NDArray[np.int64]:
    rows = [(hour, *counts) for hour, counts in sorted(hours.items()) if counts.lists]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _detail(version: str, found: Fall) -> dict[str, object]:
    """What is kept of it in the history."""
    return {
        "from": version,
        "lists": found.lists,
        "clicked": found.clicked,
        "expected": round(found.expected, 1),
        "fall": round(found.relative, 4),
        "lists_before": found.lists_before,
        "p": found.p,
    }
