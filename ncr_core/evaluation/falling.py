"""Whether click-through has fallen: a test that may be looked at as often as one likes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()
_LEAST_P = 1e-12
_TUNED = 11.5  # of the mixture: tightest at ``tuned`` lists for levels about 0.005
_DAYS_TO_TELL = 6  # fewer say nothing of how much rates differ from day to day by themselves
_ASSUMED = 0.1  # then: so much, as a standard deviation relative to the rate


@dataclass(frozen=True)
class Fall:
    """What a new version's lists were clicked, beside what the one before leads to expect.

    Of the hours of the day in which both were given out.
    """

    lists_before: int
    lists: int
    clicked: int
    expected: float
    """Clicked lists, if those of each hour of the day were clicked as often as before."""
    dispersion: float
    """How many times as much rates vary by themselves as those of independent lists would."""
    drift: float
    """The standard deviation of ``expected``: for how few lists there were before, and for how days
    differ where too few of them are known to tell."""
    tuned: int

    @property
    def relative(self) -> float:
        """1 − clicked/expected: above 0 where it has fallen."""
        return 1 - self.clicked / self.expected if self.expected > 0 else 0.0

    @property
    def p(self) -> float:
        """The chance that a fall as clear as this is *ever* seen, at any of all looks, where there
        is none: the smallest α at which ``bound`` is passed.
        """
        short = self.expected - self.clicked
        if short <= self.bound(1.0):
            return 1.0
        low, high = math.log(_LEAST_P), 0.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if short > self.bound(math.exp(middle)) else (middle, high)
        return math.exp(high)

    def bound(self, alpha: float) -> float:
        """By how much ``clicked`` may fall short of ``expected``: more, with a chance of ``alpha``.

        One half of α for the walk of the clicks around their mean, which is looked at again and
        again: the one-sided normal mixture boundary (Robbins 1970; Howard, Ramdas, McAuliffe &
        Sekhon, Annals of Statistics 2021, eq. 14), which it crosses with that chance however often
        one looks. The other for ``expected``, an estimate that looking again does not change.
        """
        half = alpha / 2
        rate = self.expected / self.lists
        step = math.sqrt(self.dispersion * rate * (1 - rate))
        mixed = self.tuned / _TUNED
        n = self.lists + mixed
        walk = step * math.sqrt(2 * n * math.log(math.sqrt(n / mixed) / (2 * half) + 1))
        return walk - _NORMAL.inv_cdf(half) * self.drift


def fall(
    before: NDArray[np.int64], since: NDArray[np.int64], usual: NDArray[np.int64], tuned: int
) -> Fall | None:
    """Compares rates hour of the day by hour of the day; None where there is nothing to compare.

    ``before`` is of the version before, ``since`` of the new one, ``usual`` of whatever was served
    in the days before. Each is (n, 3), of hours with lists: hours since 1970, the lists given out,
    and those of them that were clicked. Rates differ between night and day, and a new version has
    seen little of either: so hours are compared with the same hours of the day before. The test is
    sharpest at about ``tuned`` lists.

    Lists of one user, one hour or one day are alike, so rates vary by more than the binomial's
    variance: by how much is taken from ``usual``, by the larger of Pearson's χ² per degree of
    freedom of hours and of days, at least 1 (McCullagh & Nelder 1989, 4.5). From fewer than six
    days that cannot be told; then days are taken to differ by a tenth.
    """
    of_day, now = before[:, 0] % 24, since[:, 0] % 24
    lists = np.bincount(of_day, before[:, 1], 24)
    clicked = np.bincount(of_day, before[:, 2], 24)
    new_lists = np.bincount(now, since[:, 1], 24) * (lists > 0)
    new_clicked = np.bincount(now, since[:, 2], 24) * (lists > 0)
    there = new_lists > 0
    if not there.any():
        return None
    rates = clicked / np.maximum(lists, 1)
    expected = float((new_lists * rates).sum())
    mean = expected / float(new_lists.sum())
    dispersion = _dispersion(usual)
    by_chance = float((new_lists[there] ** 2 / lists[there]).sum()) * mean * (1 - mean)
    by_day = 0.0 if _days(usual) >= _DAYS_TO_TELL else _ASSUMED * expected
    return Fall(
        lists_before=int(lists[there].sum()),
        lists=int(new_lists.sum()),
        clicked=int(new_clicked.sum()),
        expected=expected,
        dispersion=dispersion,
        drift=math.hypot(math.sqrt(dispersion * by_chance), by_day),
        tuned=tuned,
    )


def _days(hours: NDArray[np.int64]) -> int:
    return len(np.unique(hours[:, 0] // 24))


def _dispersion(usual: NDArray[np.int64]) -> float:
    """The larger of the variances by hour and by day, in multiples of the binomial's; 1 or more."""
    if _days(usual) < _DAYS_TO_TELL:
        return 1.0
    hours, lists, clicked = usual.T
    mean = float(clicked.sum() / lists.sum())
    variance = mean * (1 - mean)
    if variance == 0:
        return 1.0
    of_day = hours % 24
    rates = np.bincount(of_day, clicked, 24) / np.maximum(np.bincount(of_day, lists, 24), 1)
    residual = clicked - lists * rates[of_day]
    days, day = np.unique(hours // 24, return_inverse=True)
    by_hour = residual**2 / (lists * variance)
    by_day = np.bincount(day, residual) ** 2 / (np.bincount(day, lists) * variance)
    free_hours, free_days = len(hours) - len(np.unique(of_day)), len(days) - 1
    found = (float(by_hour.sum()) / max(free_hours, 1), float(by_day.sum()) / free_days)
    return max(1.0, *found)
