"""The automatic return: how often it is wrong, and how long a worse version lasts.

    python -m benchmarks.auto_rollback [RUNS]

Two weeks of hours are simulated: lists and clicks that swing between night and day, by weekdays,
and, as given, from day to day and hour to hour by themselves. In the second a new version is
served, and the service's own test looks every hour, as a worker does. Wrong: it returned though
the click-through is the same. Beside it an ordinary test of two shares, one-sided at p < 0.01,
looked at as often. Of worse versions: the share returned within the week, and after how many hours
and lists, by the median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.ab_tests.auto_rollback import WINDOW_HOURS, significant_drop
from app.ab_tests.impressions import ClickCounts
from app.core.settings import Settings
from benchmarks.harness import publish, run_command

DAY = 24
Z = 2.326348  # one-sided 1 %


@dataclass(frozen=True)
class Site:
    """What is simulated."""

    name: str
    rate: float
    """Of lists that are clicked."""
    lists: int
    """An hour, on average over the day."""
    days: float
    """By how much days differ by themselves: a standard deviation, relative to the rate."""
    hours: float
    """As much of hours."""
    known_days: int = 7
    """For how long the version before was served; others were before it."""
    all_days: int = 7
    """For how long anything was served."""


SITES = (
    Site("steady", 0.1, 200, 0.0, 0.0),
    Site("busy, steady", 0.03, 5_000, 0.0, 0.0),
    Site("usual", 0.1, 200, 0.03, 0.05),
    Site("busy, usual", 0.05, 2_000, 0.03, 0.05),
    Site("restless", 0.1, 200, 0.1, 0.1),
    Site("busy, restless", 0.05, 2_000, 0.1, 0.1),
    Site("busy, usual, new version daily", 0.05, 2_000, 0.03, 0.05, 1),
    Site("busy, restless, new version daily", 0.05, 2_000, 0.1, 0.1, 1),
    Site("busy, usual, first day", 0.05, 2_000, 0.03, 0.05, 1, 1),
)
DROPS = (0.1, 0.2, 0.3, 0.5)


def simulate(
    site: Site, drop: float, rng: np.random.Generator
) -> tuple[dict[int, ClickCounts], dict[int, ClickCounts]]:
    """Clicks by hour before and after a version that is clicked less by ``drop`` was published."""
    began = 20_000 * DAY + int(rng.integers(7 * DAY))
    hours = np.arange(began - WINDOW_HOURS, began + WINDOW_HOURS)
    of_day = 2 * np.pi * (hours % DAY) / DAY
    weekend = (hours // DAY % 7 >= 5).astype(float)
    lists = rng.poisson(site.lists * (1 + 0.8 * np.sin(of_day)) * (1 + 0.3 * weekend))
    days, day = np.unique(hours // DAY, return_inverse=True)
    rate = site.rate * (1 + 0.3 * np.sin(of_day + 1)) * (1 + 0.05 * weekend)
    rate = rate * np.exp(rng.normal(0, site.days, len(days)))[day]
    rate = rate * np.exp(rng.normal(0, site.hours, len(hours)))
    rate[hours >= began] *= 1 - drop
    clicked = rng.binomial(lists, np.minimum(rate, 1))
    counts = {
        int(hour): ClickCounts(int(n), int(k))
        for hour, n, k in zip(hours, lists, clicked, strict=True)
        if n
    }
    first = began - DAY * site.all_days
    return (
        {hour: each for hour, each in counts.items() if first <= hour < began},
        {hour: each for hour, each in counts.items() if hour >= began},
    )


def watched(
    site: Site, drop: float, settings: Settings, rng: np.random.Generator
) -> tuple[tuple[int, int] | None, bool]:
    """After how many hours and lists the service returned, if it did; whether a test that knows
    nothing of looking again, of hours and of days would have.
    """
    usual, after = simulate(site, drop, rng)
    began = min(after)
    before = {h: each for h, each in usual.items() if h >= began - DAY * site.known_days}
    since: dict[int, ClickCounts] = {}
    returned: tuple[int, int] | None = None
    naive = False
    total = _total(before)
    for hour, each in sorted(after.items()):
        since[hour] = each
        now = _total(since)
        naive = naive or _naive(total, now, settings)
        if returned is None and significant_drop(before, since, usual, settings) is not None:
            returned = (hour - began + 1, now.lists)
        if returned is not None and naive:
            break
    return returned, naive


def _total(hours: Mapping[int, ClickCounts]) -> ClickCounts:
    counts: NDArray[np.int64] = np.array(list(hours.values()), dtype=np.int64)
    return ClickCounts(*counts.sum(axis=0).tolist())


def _naive(before: ClickCounts, now: ClickCounts, settings: Settings) -> bool:
    if min(before.lists, now.lists) < settings.return_lists:
        return False
    both = before.plus(now)
    share = both.clicked / both.lists
    error = np.sqrt(share * (1 - share) * (1 / before.lists + 1 / now.lists))
    gap = before.clicked / before.lists - now.clicked / now.lists
    # By as much as the service asks for, too.
    return bool(gap > Z * error and gap >= settings.return_drop * before.clicked / before.lists)


def main(runs: int = 500) -> None:
    settings = Settings()
    rows: list[list[Any]] = []
    for number, site in enumerate(SITES):
        for drop in (0.0, *DROPS):
            # Of what should be rare more runs are needed.
            n = runs if drop == 0 else max(runs // 5, 1)
            rng = np.random.default_rng([number, int(100 * drop)])
            seen = [watched(site, drop, settings, rng) for _ in range(n)]
            ended = [each for each, _ in seen if each is not None]
            rows.append(
                [
                    site.name,
                    drop,
                    n,
                    len(ended) / n,
                    median(each[0] for each in ended) if ended and drop else None,
                    median(each[1] for each in ended) if ended and drop else None,
                    sum(naive for _, naive in seen) / n,
                ]
            )
            print(rows[-1], flush=True)
    publish(
        "returning",
        ["site", "fall", "runs", "returned", "hours", "lists", "returned by an ordinary test"],
        rows,
        drop=settings.return_drop,
        least_lists=settings.return_lists,
        sites=[asdict(site) for site in SITES],
    )


if __name__ == "__main__":
    run_command(main)
