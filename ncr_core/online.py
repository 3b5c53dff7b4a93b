"""Tests on users' clicks: interleaving, and tests of differences in click-through.

Interleaving shows two rankers in one list (Radlinski, Kurup & Joachims, CIKM'08). Every user sees
both rankers at the same positions, so differences between users, hours and pages cancel. A test by
interleaving takes some tens of times fewer lists than an A/B test with separate lists.

The tests of click-through are sequential: they are valid at any number of looks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncr_core.evaluation.significance import sign_test_p, student_t_quantile

T = TypeVar("T", bound=Hashable)

Outcome = Literal[0, 1, 2]
"""The winner of a list: 0 for A, 1 for B, 2 for neither."""

LEVEL = 0.95
"""The level of the interval, and 1 − the significance level of the test."""


class RandomSource(Protocol):
    """`random.Random` or a NumPy generator."""

    def random(self) -> float:
        """A number from [0, 1)."""
        ...


class Teams(NamedTuple, Generic[T]):
    """The items that each ranker put into the list, in their order."""

    a: list[T]
    b: list[T]


class Draft(NamedTuple, Generic[T]):
    """An interleaved list, and the items in it by ranker."""

    merged: list[T]
    teams: Teams[T]


def team_draft(a: Sequence[T], b: Sequence[T], n: int, rng: RandomSource) -> Draft[T]:
    """Interleave the first ``n`` items of two rankings, as two captains choose teams in turns.

    In each round a coin decides which ranker chooses first. Each ranker chooses its best item that
    is not in the list yet (algorithm 2 of the paper). Where one ranking is used up, the rest of the
    other ranking follows and belongs to neither team.
    """
    rankings, position = (a, b), [0, 0]
    in_list: set[T] = set()
    merged: list[T] = []
    teams: tuple[list[T], list[T]] = ([], [])
    while len(merged) < n:
        for side in (0, 1):
            while (
                position[side] < len(rankings[side]) and rankings[side][position[side]] in in_list
            ):
                position[side] += 1
        used_up = position[0] == len(a), position[1] == len(b)
        lead = len(teams[0]) - len(teams[1])
        if lead == 0 and any(used_up):
            break  # the one that chooses first would be the only one
        turn = int(rng.random() < 0.5) if lead == 0 else int(lead > 0)
        if used_up[turn]:
            break
        item = rankings[turn][position[turn]]
        in_list.add(item)
        merged.append(item)
        teams[turn].append(item)
    for side in (0, 1):
        for item in rankings[side][position[side] :]:
            if len(merged) < n and item not in in_list:
                in_list.add(item)
                merged.append(item)
    return Draft(merged, Teams(*teams))


def credit(clicked: Collection[T], teams: Teams[T]) -> tuple[int, int]:
    """The number of clicked items of each team; the ranker with more wins the list."""
    return sum(item in clicked for item in teams.a), sum(item in clicked for item in teams.b)


def outcome_of(credit_a: int, credit_b: int) -> Outcome:
    """The winner of a list by the number of clicked items of each team."""
    return 0 if credit_a > credit_b else 1 if credit_b > credit_a else 2


def planned_clicked(difference: float, power: float = 0.8) -> int:
    """The number of clicked lists with which a test finds a difference Δ.

    The number is by the normal approximation of the binomial share of lists that B wins, for a
    two-sided test at 1 − `LEVEL`. The number holds for lists of different users; lists of the same
    users tell less.

    Args:
        difference: Δ, from (0, 1/2).
        power: the probability that the test finds Δ.

    Raises:
        ValueError: ``difference`` or ``power`` is not between its bounds.
    """
    if not 0 < difference < 0.5 or not 0 < power < 1:
        raise ValueError("a difference from (0, 1/2) and a power from (0, 1) are needed")
    normal = NormalDist()
    spread = 0.5 * normal.inv_cdf((1 + LEVEL) / 2)
    spread += math.sqrt(0.25 - difference**2) * normal.inv_cdf(power)
    return math.ceil((spread / difference) ** 2)


@dataclass(frozen=True)
class InterleavingResult:
    """The users' preference between two rankers, by the lists with a click."""

    wins_a: int
    """Lists that A won."""
    wins_b: int
    """Lists that B won."""
    ties: int
    users: int
    """Users with a click."""
    difference: float | None
    """Δ = (wins_b + ties/2) / (wins_a + wins_b + ties) − 1/2 (Chapelle, Joachims, Radlinski & Yue,
    TOIS 2012, eq. 1): above 0, up to 1/2, if users prefer B; None without a click."""
    interval: tuple[float, float] | None
    """The interval of Δ at `LEVEL`; None without a click."""
    p: float | None
    """The p of the sign test over users; None without a click."""

    @property
    def better(self) -> Literal["a", "b"] | None:
        """The better ranker, if both the test and the interval show it; else None."""
        if self.interval is None or self.p is None or self.p >= 1 - LEVEL:
            return None
        if self.interval[0] > 0:
            return "b"
        return "a" if self.interval[1] < 0 else None

    def as_dict(self) -> dict[str, Any]:
        """All fields and the level, for JSON."""
        return {
            "wins_a": self.wins_a,
            "wins_b": self.wins_b,
            "ties": self.ties,
            "users": self.users,
            "difference": self.difference,
            "interval": None if self.interval is None else list(self.interval),
            "level": LEVEL,
            "p": self.p,
        }


def interleaving_result(tallies: NDArray[np.int64]) -> InterleavingResult:
    """Compare two rankers by the lists that each won.

    A user's lists are alike, so users are counted, not lists:

    - p: the exact two-sided sign test on votes. Each user has one vote, for the ranker that won
      more of the user's lists. A user with a thousand lists does not outvote the others.
    - interval: Wilson's interval of B's share of the lists (Wilson 1927), with an effective number
      of lists (Korn & Graubard, Survey Methodology 1998). The effective number is that of
      independent lists with the same variance of the share, and at most the number of lists. The
      variance is by the jackknife over users (Efron & Stein 1981). Student's t replaces the normal
      quantile, with the degrees of freedom of as many users with equal numbers of lists
      (Satterthwaite 1946). The interval stays within [−1/2, 1/2] and never has the width 0.

    Both are valid for one look, after a number of lists that was fixed in advance.

    Args:
        tallies: (n_users, 3) each user's lists that A won, lists that B won, and ties with a click.

    Raises:
        ValueError: ``tallies`` has another shape.
    """
    if tallies.ndim != 2 or tallies.shape[1] != 3:
        raise ValueError(f"wins of A, wins of B and ties are needed, not {tallies.shape}")
    tallies = tallies[tallies.sum(axis=1) > 0]
    wins_a, wins_b, ties = (int(total) for total in tallies.sum(axis=0))
    users, lists = len(tallies), wins_a + wins_b + ties
    if lists == 0:
        return InterleavingResult(0, 0, 0, 0, None, None, None)
    share = (wins_b + ties / 2) / lists
    votes = np.sign(tallies[:, 1] - tallies[:, 0])
    p = sign_test_p(int((votes > 0).sum()), int((votes < 0).sum()))
    return InterleavingResult(
        wins_a, wins_b, ties, users, share - 0.5, _interval(tallies, share, lists), p
    )


def interleaving_over_time(
    users: NDArray[np.int64], outcomes: NDArray[np.int64], counts: Sequence[int]
) -> list[InterleavingResult]:
    """Compare two rankers by the first lists of a trial, for several numbers of lists.

    A chart of the results shows how the interval narrows. Only one result is a test: the result
    after the number of lists that was fixed in advance.

    Args:
        users: (n,) the number of each clicked list's user, from 0, in the order of the lists.
        outcomes: (n,) each list's `Outcome`.
        counts: numbers of lists, up to n.

    Returns:
        A result for each count, in the order of ``counts``.
    """
    n_users = int(users.max()) + 1 if len(users) else 0
    results: dict[int, InterleavingResult] = {}
    tallies, done = np.zeros((n_users, 3), dtype=np.int64), 0
    for count in sorted(set(counts)):
        np.add.at(tallies, (users[done:count], outcomes[done:count]), 1)
        done = count
        results[count] = interleaving_result(tallies)
    return [results[count] for count in counts]


def _interval(tallies: NDArray[np.int64], share: float, lists: int) -> tuple[float, float]:
    users = len(tallies)
    if users == 1:
        return -0.5, 0.5  # one user says nothing of how users differ
    lists_of_user = tallies.sum(axis=1)
    share_without = (tallies[:, 1] + tallies[:, 2] / 2 - share * lists_of_user) / (
        lists - lists_of_user
    )
    variance = (users - 1) / users * float((share_without**2).sum())
    n: float = lists
    if share in (0, 1):
        n = users  # all alike: how much a user's other lists add is not known
    elif variance > 0:
        n = min(share * (1 - share) / variance, lists)
    squares = lists_of_user.astype(np.float64) ** 2
    degrees = max(float(squares.sum() ** 2 / (squares**2).sum()) - 1, 1.0)
    t = student_t_quantile((1 + LEVEL) / 2, degrees)
    centre = (share + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(share * (1 - share) / n + t**2 / (4 * n**2))
    low, high = max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0)
    return low - 0.5, high - 0.5


_NORMAL = NormalDist()
_MIN_P = 1e-12
_MIXTURE_RATIO = 11.5  # lists per unit of the mixture: tightest at `tuned_lists` for α about 0.005
_MIN_DAYS = 6  # fewer do not show how much rates differ from day to day
_ASSUMED_DAY_STD = 0.1  # with fewer: the standard deviation between days, relative to the rate
_BISECTIONS = 40


@dataclass(frozen=True)
class ClickThroughDrop:
    """Clicked lists of a new version beside their expected number by its predecessor's rates.

    The comparison takes only the hours of the day in which both versions gave out lists.
    """

    lists_before: int
    """Lists of the predecessor."""
    lists: int
    """Lists of the new version."""
    clicked: int
    """Lists of the new version that were clicked."""
    expected: float
    """The number of clicked lists at the predecessor's rate in each hour of the day."""
    dispersion: float
    """The variance of rates as a multiple of the variance with independent lists, at least 1."""
    expected_std: float
    """The standard deviation of ``expected``, by the predecessor's number of lists. If too few days
    are known, it includes an assumed difference between days."""
    tuned_lists: int
    """The number of lists at which the test is sharpest."""

    @property
    def relative_drop(self) -> float:
        """1 − clicked/expected: above 0 where click-through is lower than before."""
        return 1 - self.clicked / self.expected if self.expected > 0 else 0.0

    @property
    def p(self) -> float:
        """The probability of *ever* seeing so clear a drop, at any of all looks, if there is none.

        p is the smallest α at which the shortfall passes `bound`.
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
        """The shortfall ``expected`` − ``clicked`` that chance passes with probability ``alpha``.

        One half of α is for the walk of the clicks around their mean, over any number of looks. The
        walk crosses the one-sided normal mixture boundary with that probability (Robbins 1970;
        Howard, Ramdas, McAuliffe & Sekhon, Annals of Statistics 2021, eq. 14). The other half is
        for ``expected``, an estimate that further looks do not change.
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
    """Compare the click-through rates of two versions by hour of the day.

    Rates differ between night and day, and a new version has served few hours. So each hour of the
    new version is compared with the same hour of the day under its predecessor.

    Lists of one user, one hour or one day are alike, so rates vary by more than the binomial
    variance. ``baseline`` gives the factor: the larger of Pearson's χ² per degree of freedom of
    hours and of days, at least 1 (McCullagh & Nelder 1989, 4.5). Fewer than six days do not show
    the factor. The standard deviation between days is then assumed to be a tenth of the rate.

    Args:
        previous: (n, 3) rows of the predecessor: hours since 1970, the lists given out in that
            hour, and the clicked lists among them. Hours without lists are left out.
        current: the rows of the new version.
        baseline: the rows of all versions that were served in the days before.
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
    """The larger variance, by hour or by day, as a multiple of the binomial one; at least 1."""
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


MIN_ARM_USERS = 30
"""The minimum number of users of each arm for an interval; with fewer, the variance is unknown."""
POWER = 0.8
"""The probability that a trial finds the difference `ClickThroughDifference.detectable`."""


class ArmCounts(NamedTuple):
    """The lists of one arm of an A/B test, with sums over its users."""

    users: int
    """Users with a list."""
    lists: int
    clicked: int
    """Lists with a click."""
    lists_squared: int
    """The sum over users of the squared number of lists."""
    clicked_squared: int
    """The sum over users of the squared number of clicked lists."""
    lists_times_clicked: int
    """The sum over users of the product of both numbers."""

    @property
    def rate(self) -> float | None:
        """Clicked lists per list; None without a list."""
        return self.clicked / self.lists if self.lists else None

    def plus(self, other: ArmCounts) -> ArmCounts:
        """The counts of two arms together, which have different users."""
        return ArmCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def variance(self, both: ArmCounts) -> float:
        """The variance of the rate over users, whose lists are alike; for an arm with lists.

        The variance is that of a ratio of two means by the delta method (Deng, Knoblich & Lu, KDD
        2018). The few clicks of a small arm give too small a value. So the variance is at least
        that of independent lists with two clicked and two other lists added (Agresti & Coull 1998),
        times the design effect of both arms together.
        """
        likely = (self.clicked + 2) / (self.lists + 4)
        independent = likely * (1 - likely) / self.lists
        rate = both.clicked / both.lists
        alike = both._between_users * both.lists / (rate * (1 - rate)) if 0 < rate < 1 else 1.0
        spread = self.lists_squared / self.lists / (both.lists_squared / both.lists)
        return max(self._between_users, independent * max(1.0, alike * max(1.0, spread)))

    @property
    def _between_users(self) -> float:
        rate = self.clicked / self.lists
        squares = (
            self.clicked_squared
            - 2 * rate * self.lists_times_clicked
            + rate**2 * self.lists_squared
        )
        return squares / self.lists**2 * self.users / max(1, self.users - 1)


@dataclass(frozen=True)
class ClickThroughDifference:
    """The difference of the click-through of arm B from that of arm A, valid at any look.

    The interval is a confidence sequence: with probability `LEVEL` it covers the true difference at
    all looks together. An operator may look at any time, and stop at a clear result. The sequence
    is the asymptotic one of the normal mixture (Robbins 1970; Waudby-Smith, Arbour, Sinha, Kennedy
    & Ramdas, Annals of Statistics 2024, theorem 2.2), with the number of lists as its clock.
    """

    rate_a: float
    difference: float
    """The rate of B less that of A."""
    std: float
    """The standard deviation of the difference."""
    lists: int
    """Lists of both arms."""
    planned_lists: int
    """The number of lists of both arms for which the interval is tuned to be narrowest."""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the difference, within [−1, 1]."""
        half = self.std * _mixture_quantile(self.lists / self.planned_lists)
        return max(-1.0, self.difference - half), min(1.0, self.difference + half)

    @property
    def p(self) -> float:
        """The probability of *ever* seeing so clear a difference if there is none."""
        scale = self.lists / self.planned_lists * _MIXTURE_SCALE
        exponent = (self.difference / self.std) ** 2 * scale / (2 * (scale + 1))
        return min(1.0, max(_MIN_P, math.sqrt(scale + 1) * math.exp(-exponent)))

    @property
    def relative(self) -> float | None:
        """The difference as a fraction of A's rate; None if A's rate is 0."""
        return self.difference / self.rate_a if self.rate_a else None

    @property
    def detectable(self) -> float | None:
        """The fraction of A's rate that ``planned_lists`` find with probability `POWER`.

        None if A's rate is 0.
        """
        std = self.std * math.sqrt(self.lists / self.planned_lists)
        found = std * (_mixture_quantile(1.0) + _NORMAL.inv_cdf(POWER))
        return found / self.rate_a if self.rate_a else None

    @property
    def better(self) -> Literal["a", "b"] | None:
        """The arm whose lists are clicked more, if the interval shows one."""
        low, high = self.interval
        return "b" if low > 0 else "a" if high < 0 else None


def click_through_difference(
    a: ArmCounts, b: ArmCounts, planned_lists: int
) -> ClickThroughDifference | None:
    """Compare the click-through of two arms, whose users were drawn by chance.

    Returns:
        The difference; None while an arm has fewer than `MIN_ARM_USERS` users.
    """
    if min(a.users, b.users) < MIN_ARM_USERS:
        return None
    rate_a, rate_b, both = a.clicked / a.lists, b.clicked / b.lists, a.plus(b)
    return ClickThroughDifference(
        rate_a=rate_a,
        difference=rate_b - rate_a,
        std=math.sqrt(a.variance(both) + b.variance(both)),
        lists=a.lists + b.lists,
        planned_lists=planned_lists,
    )


_LOG = -2 * math.log(1 - LEVEL)
_MIXTURE_SCALE = _LOG + math.log(_LOG + 1)
"""The scale with the narrowest interval at the planned lists (the paper's equation 24)."""


def _mixture_quantile(progress: float) -> float:
    """Half the width of the interval in standard deviations, at a part of the planned lists."""
    scale = progress * _MIXTURE_SCALE
    return math.sqrt(2 * (scale + 1) / scale * math.log(math.sqrt(scale + 1) / (1 - LEVEL)))
