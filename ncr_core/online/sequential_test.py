"""Whether click-through has dropped: a sequential test, valid however often it is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()
_MIN_P = 1e-12
_MIXTURE_RATIO = 11.5  # lists per unit of the mixture: tightest at `tuned_lists` for α about 0.005
_MIN_DAYS = 6  # fewer do not show how much rates differ from day to day
_ASSUMED_DAY_STD = 0.1  # with fewer: the standard deviation between days, relative to the rate
_BISECTIONS = 40


@dataclass(frozen=True)
class ClickThroughDrop:
    """Clicked lists of a new version beside those that its predecessor's rates lead to expect.

    Only hours of the day count in which both versions gave out lists.
    """

    lists_before: int
    """Lists of the predecessor."""
    lists: int
    """Lists of the new version."""
    clicked: int
    """Lists of the new version that were clicked."""
    expected: float
    """Clicked lists if those of each hour of the day were clicked as often as before."""
    dispersion: float
    """The variance of rates as a multiple of that of independent lists, at least 1."""
    expected_std: float
    """The standard deviation of ``expected``: for how few lists there were before, and for how days
    differ where too few of them are known."""
    tuned_lists: int
    """The number of lists at which the test is sharpest."""

    @property
    def relative_drop(self) -> float:
        """1 − clicked/expected: above 0 where click-through is lower than before."""
        return 1 - self.clicked / self.expected if self.expected > 0 else 0.0

    @property
    def p(self) -> float:
        """The probability of *ever* seeing so clear a drop, at any of all looks, if there is none.

        It is the smallest α at which `bound` is passed.
        """
        shortfall = self.expected - self.clicked
        if shortfall <= self.bound(1.0):
            return 1.0
        low, high = math.log(_MIN_P), 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            passed = shortfall > self.bound(math.exp(middle))
            low, high = (low, middle) if passed else (middle, high)
        return math.exp(high)

    def bound(self, alpha: float) -> float:
        """The shortfall ``expected`` − ``clicked`` that is passed with probability ``alpha``.

        One half of α is for the walk of the clicks around their mean, which is looked at again and
        again: the one-sided normal mixture boundary (Robbins 1970; Howard, Ramdas, McAuliffe &
        Sekhon, Annals of Statistics 2021, eq. 14) is crossed with that probability however often
        one looks. The other half is for ``expected``, an estimate that looking does not change.
        """
        half = alpha / 2
        rate = self.expected / self.lists
        step = math.sqrt(self.dispersion * rate * (1 - rate))
        mixture = self.tuned_lists / _MIXTURE_RATIO
        n = self.lists + mixture
        walk = step * math.sqrt(2 * n * math.log(math.sqrt(n / mixture) / (2 * half) + 1))
        return walk - _NORMAL.inv_cdf(half) * self.expected_std


def click_through_drop(
    previous: NDArray[np.int64],
    current: NDArray[np.int64],
    baseline: NDArray[np.int64],
    tuned_lists: int,
) -> ClickThroughDrop | None:
    """Compare click-through rates hour of the day by hour of the day.

    Rates differ between night and day, and a new version has seen little of either; so hours are
    compared with the same hours of the day before.

    Lists of one user, one hour or one day are alike, so rates vary by more than the binomial's
    variance. By how much is taken from ``baseline``: the larger of Pearson's χ² per degree of
    freedom of hours and of days, at least 1 (McCullagh & Nelder 1989, 4.5). Fewer than six days do
    not show it; days are then assumed to differ by a tenth.

    Args:
        previous: (n, 3) rows of the version before: hours since 1970, the lists given out in that
            hour, and those of them that were clicked. Hours without lists are left out.
        current: the same of the new version.
        baseline: the same of whatever was served in the days before.
        tuned_lists: the number of lists at which the test is sharpest.

    Returns:
        The drop; None if there is no hour of the day with lists of both versions.
    """
    previous_hour, current_hour = previous[:, 0] % 24, current[:, 0] % 24
    lists_before = np.bincount(previous_hour, previous[:, 1], 24)
    clicked_before = np.bincount(previous_hour, previous[:, 2], 24)
    lists = np.bincount(current_hour, current[:, 1], 24) * (lists_before > 0)
    clicked = np.bincount(current_hour, current[:, 2], 24) * (lists_before > 0)
    in_both = lists > 0
    if not in_both.any():
        return None
    rates = clicked_before / np.maximum(lists_before, 1)
    expected = float((lists * rates).sum())
    mean = expected / float(lists.sum())
    dispersion = _dispersion(baseline)
    sampling = float((lists[in_both] ** 2 / lists_before[in_both]).sum()) * mean * (1 - mean)
    between_days = 0.0 if _count_days(baseline) >= _MIN_DAYS else _ASSUMED_DAY_STD * expected
    return ClickThroughDrop(
        lists_before=int(lists_before[in_both].sum()),
        lists=int(lists.sum()),
        clicked=int(clicked.sum()),
        expected=expected,
        dispersion=dispersion,
        expected_std=math.hypot(math.sqrt(dispersion * sampling), between_days),
        tuned_lists=tuned_lists,
    )


def _count_days(hours: NDArray[np.int64]) -> int:
    return len(np.unique(hours[:, 0] // 24))


def _dispersion(baseline: NDArray[np.int64]) -> float:
    """The larger variance, by hour or by day, as a multiple of the binomial's; at least 1."""
    if _count_days(baseline) < _MIN_DAYS:
        return 1.0
    hours, lists, clicked = baseline.T
    mean = float(clicked.sum() / lists.sum())
    variance = mean * (1 - mean)
    if variance == 0:
        return 1.0
    hour_of_day = hours % 24
    lists_by_hour = np.bincount(hour_of_day, lists, 24)
    rates = np.bincount(hour_of_day, clicked, 24) / np.maximum(lists_by_hour, 1)
    residuals = clicked - lists * rates[hour_of_day]
    days, day = np.unique(hours // 24, return_inverse=True)
    by_hour = residuals**2 / (lists * variance)
    by_day = np.bincount(day, residuals) ** 2 / (np.bincount(day, lists) * variance)
    hour_degrees, day_degrees = len(hours) - len(np.unique(hour_of_day)), len(days) - 1
    return max(1.0, float(by_hour.sum()) / max(hour_degrees, 1), float(by_day.sum()) / day_degrees)
